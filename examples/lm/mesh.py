"""A mesh of devices, as it is written on the command line."""


def axes(text: str) -> dict[str, int]:
    """The sizes of the axes of, for example, "data=2,tensor=2"."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    if not sizes.keys() <= {"data", "tensor"}:
        raise ValueError(f"the mesh {text!r} may have the axes data and tensor")
    return sizes
