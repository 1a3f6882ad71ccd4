"""The house: the way of a call through the files, the arguments of functions, and the words of names."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "cce_jax", ROOT / "cce_torch", ROOT / "kernels" / "cce_kernels"
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MOST_FILES = {"JAX": 6, "PyTorch": 6}
MOST_ARGUMENTS = 8
# with an argument for each option
PUBLIC = {"linear_cross_entropy", "linear_log_probs", "linear_token_loss", "linear_divergence", "explain", "__init__"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module(path: Path) -> str:
    name = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("kernels/").replace("/", ".")
    return name.removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """The modules that a file imports, at its top or in a function; and of `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{x.name}" for x in node.names}
    return found


def launches(path: Path) -> set[str]:
    """The functions of a file, and what it imports from others to name it there."""
    body = tree(path).body
    own = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return own | {x.name for node in body if isinstance(node, ast.ImportFrom) for x in node.names}


def asks(path: Path) -> set[str]:
    """The launches of engines that a file asks for: x.engine.launch(...), or engine.launch(...)."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if name == "engine":
                found.add(node.func.attr)
    return found


def ways() -> dict[str, list[Path]]:
    """The ways of a call that CONTRIBUTING.md lists: a heading each, and a file a line."""
    section = CONTRIBUTING.split("## The way of a call\n")[1].split("\n## ")[0]
    found = {}
    for name, block in re.findall(r"^From (\w+).*?```\n(.*?)```", section, re.MULTILINE | re.DOTALL):
        found[name] = [ROOT / line.split()[0] for line in block.splitlines()]
    return found


@pytest.mark.parametrize("framework", MOST_FILES)
def test_a_call_goes_through_few_files_and_no_file_twice(framework):
    """Each file imports the next one. Or it asks the plan's engine for a launch that the next file has."""
    way = ways()[framework]
    assert len(way) == len(set(way)) <= MOST_FILES[framework]
    for path, after in itertools.pairwise(way):
        assert module(after) in imports(path) or asks(path) & launches(after), (path.name, after.name)
    assert "pallas" in way[-1].read_text()


def test_one_rule_is_written_by_hand_and_every_call_has_a_layout():
    texts = {path: path.read_text() for path in FILES if path.is_relative_to(ROOT / "cce_jax")}
    assert [path.name for path, text in texts.items() if "jax.custom_vjp" in text] == ["core.py"]
    assert sum(text.count("jax.custom_vjp") for text in texts.values()) == 1
    assert [path.name for path, text in texts.items() if "layout is" in text or "Layout | None" in text] == []


def test_in_pytorch_two_rules_are_written_by_hand_and_few_operators():
    """Formed and Recomputed, of _Rule, and the error for their own derivatives."""
    bases = {}
    for path in FILES:
        for node in ast.walk(tree(path)) if path.is_relative_to(ROOT / "cce_torch") else ():
            if isinstance(node, ast.ClassDef) and {"Function", "torch.autograd.Function"} & set(
                map(ast.unparse, node.bases)
            ):
                bases[node.name] = path.name
    assert bases == {"_Rule": "autograd.py", "_Guarded": "autograd.py"}
    made = [
        (call.func.id, ast.literal_eval(call.args[0]))
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("of_jax", "of_torch")
    ]
    assert {name for of, name in made if of == "of_jax"} == {"loss", "gradients", "target", "divergence"}
    assert len([name for of, name in made if of == "of_torch"]) <= 3


def rooms() -> dict[str, set[str]]:
    """The files and folders of kernels/cce_kernels, and what each of them imports of the others."""
    package = ROOT / "kernels" / "cce_kernels"
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        room, *_ = path.relative_to(package).with_suffix("").parts
        names = {name.split(".")[1] for name in imports(path) if name.startswith("cce_kernels.")}
        found.setdefault(room, set()).update(names - {room})
    return {room: names & set(found) for room, names in found.items()}


def test_the_kernels_have_seven_floors_and_no_circle():
    """A room stands above those that it imports."""
    of, floors = rooms(), {}
    while len(floors) < len(of):
        ready = {room for room in of if room not in floors and of[room] <= set(floors)}
        assert ready, "a circle"
        floors |= {room: 1 + max((floors[name] for name in of[room]), default=0) for room in ready}
    assert max(floors.values()) <= 7


def test_the_files_of_cce_torch_import_each_other_in_no_circle():
    """Nor in functions."""
    package = {module(path): path for path in FILES if path.is_relative_to(ROOT / "cce_torch")}
    waiting = {name: (imports(path) & set(package)) - {name, "cce_torch"} for name, path in package.items()}
    while waiting:
        ready = {name for name, needed in waiting.items() if not needed & set(waiting)}
        assert ready, sorted(waiting)
        waiting = {name: needed for name, needed in waiting.items() if name not in ready}


def functions() -> list[tuple[Path, ast.FunctionDef]]:
    return [(path, node) for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]


def test_no_function_takes_many_arguments():
    """But public functions, PyTorch's operators, and the bodies of kernels, whose arguments refer to memory."""
    many = []
    for path, node in functions():
        names = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        of_kernel = any(name.endswith("_ref") for name in names)
        of_operator = re.search(r"custom_op|register_|_library", " ".join(map(ast.unparse, node.decorator_list)))
        many_here = len([x for x in names if x not in ("self", "cls", "ctx")]) > MOST_ARGUMENTS
        if many_here and not of_kernel and not of_operator:
            many.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert [x for x in many if x.split(": ")[1] not in PUBLIC] == []


def words() -> set[str]:
    """The words that CONTRIBUTING.md says names do not have, in the last column of its table of words."""
    rows = re.findall(
        r"^\| .*? \| .*? \| (.*?) \|$", CONTRIBUTING.split("## Words\n")[1].split("\n## ")[0], re.MULTILINE
    )
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


def names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_names_have_the_words_of_the_list():
    assert len(words()) > 5
    found = {x: path for path in FILES for x in names(path) if {x.strip("_"), x.strip("_").lower()} & words()}
    assert {name: str(path.relative_to(ROOT)) for name, path in found.items()} == {}


COMPAT = "kernels/cce_kernels/compat.py", "cce_jax/compat.py", "cce_torch/on_jax/compat.py"
PRIVATE = re.compile(r"(jax\.(_src|extend|interpreters|lib|version|__version\w*)|jaxlib)(\.|$)")


def private(path: Path) -> set[str]:
    """What a file imports or reads of JAX that is private, or is its version."""
    read = {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    return {name for name in imports(path) | read if PRIVATE.match(name)}


def test_one_file_of_each_package_has_all_that_is_private_in_jax():
    of_files = {str(path.relative_to(ROOT)): private(path) for path in FILES}
    assert all(of_files.pop(name) for name in COMPAT)
    assert {name: found for name, found in of_files.items() if found} == {}
    text = "".join(path.read_text() for path in FILES if path.name != "compat.py")
    assert not re.search(r"""version\(["']jax(lib)?["']\)""", text), "of importlib.metadata"


def test_no_package_imports_from_one_above_it():
    order = "cce_kernels", "cce_jax", "cce_torch"
    for path in FILES:
        of, *_ = module(path).split(".")
        above = order[order.index(of) + 1 :]
        assert not {name for name in imports(path) if name.split(".")[0] in above}, path


def test_nothing_is_kept_from_the_formatter():
    assert [str(path.relative_to(ROOT)) for path in FILES if "fmt: " + "skip" in path.read_text()] == []
