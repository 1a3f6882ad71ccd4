"""An array by its `__jax_array__` alone, and a pytree, as a framework's parameter is."""

import jax


class Wrapped:
    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


jax.tree_util.register_pytree_node(Wrapped, lambda x: ((x.value,), None), lambda _, values: Wrapped(*values))
