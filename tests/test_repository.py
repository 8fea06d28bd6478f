"""Repository rules that ruff, mypy and import-linter cannot check: sizes, docstrings, paths, names."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import clipstream
from clipstream.cli.main import VERBS

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "clipstream").rglob("*.py"))
SOURCES = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

FILE_LINES = 600
FUNCTION_LINES = 80

# Folders of one machine, and hosts that packages come from, have no place in a file that others run.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|home|root|Users|mnt|scratch)/\w")
REGISTRY = re.compile(r"(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|index-url)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_and_functions_are_short() -> None:
    long = [name_of(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > FILE_LINES]
    for path in SOURCES:
        for function in functions(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            long += [f"{name_of(path)}:{function.name}: {lines} lines"] if lines > FUNCTION_LINES else []
    assert not long


MODULES = 12  # in a package, without the verbs
DEFERRED = 28  # imports of ours inside functions: what must not be imported before it is needed


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether inside a function."""
    names = {".".join(other.relative_to(ROOT).with_suffix("").parts) for other in PACKAGE}

    def below(node: ast.AST, deferred: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "clipstream":
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield full if full in names else str(child.module), inside
            else:
                yield from below(child, inside)

    return below(ast.parse(path.read_text(encoding="utf-8")), False)


def test_packages_are_small() -> None:
    verbs = {ROOT / "clipstream" / "cli" / "verbs" / f"{verb}.py" for verb in VERBS}
    counts = Counter(path.parent for path in PACKAGE if path.name != "__init__.py" and path not in verbs)
    assert {name_of(folder): n for folder, n in counts.items() if n > MODULES} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions included, which import-linter's contracts see but Python forgives."""
    graph = {".".join(path.relative_to(ROOT).with_suffix("").parts): set(imports_of(path)) for path in PACKAGE}
    order = TopologicalSorter({module: {name for name, _ in found} for module, found in graph.items()})
    order.prepare()  # raises CycleError, with the circle
    assert sum(deferred for found in graph.values() for _, deferred in found) <= DEFERRED


def test_no_test_imports_another() -> None:
    for path in SOURCES:
        if path.name.startswith("test_"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            assert not [name for name in found if name.startswith("tests.") and ".support" not in name], path


def test_no_module_has_the_name_of_a_standard_one() -> None:
    top = {path.stem for path in (ROOT / "clipstream").glob("*.py")} - {"__init__", "__main__"}
    assert not top & sys.stdlib_module_names


def test_no_machine_paths_and_no_registries() -> None:
    ignored = {".git", ".venv", "runs", "build", "dist", "shared"}
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ""}
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if ignored & set(parts) or any(part.endswith(("cache", ".egg-info", ".hypothesis")) for part in parts):
            continue
        if path.is_file() and path.suffix in kinds and path != Path(__file__).resolve():
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name_of(path)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
            found += [f"{name_of(path)}: {match[0]}" for match in REGISTRY.finditer(text)]
    assert not found


def test_configs_open_with_their_command() -> None:
    for path in (ROOT / "configs").rglob("*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        opening = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
        command = r"(torchrun .* -m clipstream\.train|python -m clipstream\.train|clipstream \w+)"
        assert re.search(rf"^#\s+{command} .*{name_of(path)}", opening, re.M), opening


def test_settings_import_no_torch() -> None:
    owners = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE if path.name == "settings.py"]
    imports = f"import sys, {', '.join(owners)}, clipstream.cli.main"
    code = f"{imports}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["train", "--help", "data.sampling"]], ids=" ".join)
def test_help_imports_no_arrays(argv: list[str]) -> None:
    """Nor pydantic to list the verbs."""
    heavy = f"{ {'torch', 'numpy', 'pyarrow', 'PIL', *['pydantic'] * (argv == ['--help'])} } & sys.modules.keys()"
    code = f"import sys; from clipstream.cli.main import main; main({argv}); sys.exit(' '.join({heavy}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(("usage", "data.sampling"))


def test_dependencies_have_lower_bounds_only_which_are_the_lowest_constraints() -> None:
    """A bound of 2.10 is a constraint of 2.10.0; torchvision has no bound, as its versions go with torch's."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.S | re.M)
    assert block is not None
    required = re.findall(r'"([^"]+)"', block[1])
    assert not [one for one in required if re.search(r"==|<|~=|@", one)]
    bounds = {name.lower(): version for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', block[1])}
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert len(bounds) >= 18
    for name, bound in bounds.items():
        assert re.fullmatch(re.escape(bound) + r"(\.0)*", lowest[name]), name


def test_the_package_the_changelog_and_the_citation_have_one_version() -> None:
    """The release workflow compares them by the same commands. Headings are those of Keep a Changelog, newest first."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings[1:]]
    versions, dates = zip(*[found.groups() for found in released if found is not None], strict=True)
    assert len(versions) == len(released) and list(dates) == sorted(dates, reverse=True)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert versions[0] == clipstream.__version__ and f"\nversion: {versions[0]}\n" in citation
    assert f"\ndate-released: {dates[0]}\n" in citation
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (commands,) = re.findall(r"- name: The tag is the version\n +run: \|\n((?: {10}.*\n)+)", workflow)
    for tag, code in ((f"v{versions[0]}", 0), ("v99.0.0", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-e", "-c", textwrap.dedent(commands)], cwd=ROOT, env=env, check=False)
        assert done.returncode == code, tag
