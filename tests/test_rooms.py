"""The rooms of the house: imports point down only, and nowhere in circles."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import trueup

SRC = Path(trueup.__file__).parent
ROOMS = (
    {"errors", "statistics", "files", "progress", "patterns"},
    {"process", "parametrization", "bands", "noise", "solvers", "stored", "fitted", "distributed"},
    {"denoiser", "images", "hf", "analytic"},
    {"calibration"},
    {"estimate", "sampling"},
    {"fitting", "recording", "doctor"},
    {"metrics", "density", "evaluation", "comparison"},
    {
        "report",
        "figure",
        "page",
        "demo",
        "typed",
        "openings",
        "options",
        "checks",
        "commands",
        "cli",
        "__main__",
    },
)
APART = {("estimate", "sampling"), ("sampling", "estimate")}  # neighbours that must not know each other
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}
MODULES = {
    ".".join(("trueup", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}


def imported(module):
    """Every module that a module names in an import, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


IMPORTS = {module: set(imported(module)) for module in MODULES}


def room(module):
    return module.split(".")[1]


def test_every_module_has_a_room():
    assert {room(module) for module in MODULES if module != "trueup"} == set(ROW)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "trueup"])
def test_imports_point_down(module):
    above = [
        name
        for name in IMPORTS[module]
        if name in MODULES and name != "trueup"
        if ROW[room(name)] > ROW[room(module)] or (room(module), room(name)) in APART
    ]
    assert not above, f"{module} imports {', '.join(above)}, which is not below it"


def test_no_module_imports_itself_in_the_end():
    state = {}

    def visit(module, path):
        if state.get(module) == "left":
            return
        assert state.get(module) != "entered", f"a circle: {' -> '.join([*path, module])}"
        state[module] = "entered"
        for name in sorted(IMPORTS[module] & MODULES.keys() - {"trueup"}):
            visit(name, [*path, module])
        state[module] = "left"

    for module in MODULES:
        if module != "trueup":
            visit(module, [])


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("diffusers", "trueup.hf."),
        ("huggingface_hub", "trueup.hf.hub"),
        ("tqdm", "trueup.progress"),
        ("matplotlib", "trueup.figure"),
        ("triton", "trueup.calibration.fused"),
    ],
)
def test_libraries_with_a_room_of_their_own(library, home):
    users = [m for m, names in IMPORTS.items() if any(name.split(".")[0] == library for name in names)]
    assert users
    assert all(module.startswith(home) for module in users), users


PAGE = SRC.parent.parent / "docs" / "architecture.md"


def test_the_page_lists_the_rooms():
    rows = re.findall(r"^\| (\d) \| (.*?) \|", PAGE.read_text(), re.M)
    listed = {int(row): {name.strip("`") for name in re.findall(r"`\w+`", rooms)} for row, rooms in rows}
    assert listed == dict(enumerate(ROOMS))


def test_what_the_page_names_exists():
    names = [n for n in re.findall(r"`(\w+(?:\.\w+)+)`", PAGE.read_text()) if n.split(".")[0] in ROW]
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        depth = max(k for k in range(1, len(parts) + 1) if ".".join(("trueup", *parts[:k])) in MODULES)
        found = import_module(".".join(("trueup", *parts[:depth])))
        for part in parts[depth:]:
            found = getattr(found, part)
