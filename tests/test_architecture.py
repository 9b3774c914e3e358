"""The arrows: a module imports only from those before it, and `import kitlib` or `check` loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kitlib

PACKAGE = Path(kitlib.__file__).parent
LAYERS = [  # left may be imported by right, never back; names of one entry do not import one another
    {"findings", "paths"}, {"checkpoint"}, {"contract"}, {"engines"}, {"launch", "logs", "training"},
    {"checks", "probe"}, {"convert", "server"}, {"drafter"}, {"features"}, {"acceptance"},
    {"observed", "switches", "trees", "texts"}, {"diagnose"}, {"divergence", "dumps"}, {"trainer_rules"},
    {"comparison", "search", "attribution"}, {"lab"}, {"rows"}, {"workbench"}, {"serving", "matrix"},
    {"show"}, {"report"}, {"commands"}, {"__main__"},
]  # fmt: skip
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}
LAZY = {"checks": {"convert"}, "convert": {"probe", "checks"}}  # inside functions only, where a command is asked for
DRAWING = {"matplotlib", "IPython", "ipywidgets"}


def imports(file: Path) -> list[tuple[int, str, bool]]:
    """(line, module, at module level) of every import; the kit's own as `kitlib.x`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    package = ("kitlib", *file.relative_to(PACKAGE).parent.parts)
    found = []
    for node in ast.walk(tree):
        top = id(node) not in inner
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name, top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(x for x in (base, node.module) if x)
            found += [(node.lineno, f"{module}.{a.name}" if module == "kitlib" else module, top) for a in node.names]
    return found


FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if "cpu_engine" not in f.parts]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_arrows(file):
    me = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if me == "__init__":
        return
    assert me in RANK, f"{me} has no place among the arrows"
    for line, module, top in imports(file):
        if not module.startswith("kitlib."):
            if module.split(".")[0] in DRAWING:
                assert me == "show", f"{file.name}:{line} draws; only show does"
            continue
        other = module.split(".")[1]
        if other in (me, "__version__"):
            continue
        allowed = RANK[other] < RANK[me] or (not top and other in LAZY.get(me, ()))
        assert allowed, f"{file.name}:{line} imports {other}, which comes after {me}"
        if me == "show":
            assert other == "findings", f"{file.name}:{line}: show knows findings and plain data only"
    assert not any(m.split(".")[0] == "kitlib" and "cpu_engine" in m for _, m, _ in imports(file))


def test_files_are_short():
    long = {str(f.relative_to(PACKAGE)): n for f in FILES if (n := len(f.read_text().splitlines())) > 320}
    assert not long


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_importing_kitlib_and_checking_loads_no_torch(tmp_path):
    code = f"""
import sys
import kitlib
from kitlib.__main__ import main
code = main(["check", {str(PACKAGE.parent / "data" / "lab-drafter")!r}, "--json"])
assert "torch" not in sys.modules and "transformers" not in sys.modules, "torch was imported"
sys.exit(code)
"""
    done = run(code)
    assert done.returncode == 1, done.stderr  # the nested config is refused by every SGLang: K120
    assert '"K120"' in done.stdout


def test_front_door_names_exist():
    for name in kitlib.__all__:
        assert getattr(kitlib, name) is not None
    with pytest.raises(AttributeError):
        kitlib.nothing  # noqa: B018
