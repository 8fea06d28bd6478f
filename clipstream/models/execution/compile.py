"""Compilation of the towers by torch.compile: of each repeated block, of each tower's blocks as one graph, or of the
whole forward pass of a step.

The method of a module is replaced on the instance by its compiled form, so that names in state dicts stay, hooks
(FSDP's, which gather parameters) run around `forward`, and a deep copy runs its own weights. Modules of one class share
the compiled function: equal blocks are one compilation. Shapes are static; text buckets have few sizes for it
(`TextBuckets.portions`). Compiled random operations draw the numbers of eager ones, in both passes of gradient caching.

What the backend cannot compile runs as torch captured it, and what torch cannot capture runs as it was written: with a
warning, for that function alone. Errors of the code itself are raised as without compilation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils._pytree import tree_map_only

from clipstream.errors import SettingsError
from clipstream.models.execution.checkpointing import enabled_backends
from clipstream.models.layers import blocks
from clipstream.models.settings import CUDA_GRAPHS, NOTHING_COMPILED
from clipstream.text import counted, shortened
from clipstream.utils.logs import logger

Parts = Literal["blocks", "towers", "step"]
Graph = Callable[..., Any]
Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Graph]

PORTIONS = 8  # sizes of a text bucket, in parts of the batch
GRAPHS = 256  # most compilations of a function: lengths and sizes of text buckets, with and without gradients
SHOWN = 200  # characters of a reason in a line of the log


@dataclass(eq=False)
class Compilation:
    """Backend of torch.compile for the towers, and what it has compiled."""

    compile: Compiler
    name: str
    cuda_graphs: bool = False  # whether CUDA graphs are recorded, whose outputs are overwritten by later passes
    strict: bool = False  # whether a failed compilation is an error, not a warning
    graphs: int = 0  # graphs compiled, forward and backward pass as one
    text_buckets: Any = None  # of the towers, before they were compiled
    _told: set[str] = field(default_factory=set)
    _reported: int = 0  # graphs

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Graph:
        """Compile a graph, its backward pass at once; the graph itself, run eagerly, where the backend fails."""
        import torch._functorch.config as config

        self.graphs += 1
        try:
            with config.patch(force_non_lazy_backward_lowering=True):
                return self.compile(graph, inputs)
        except Exception as error:  # of the compiler: the graph has not run yet
            self.warn(f"{self.name} cannot compile a part of the towers, which runs uncompiled", error)
            return graph.forward

    def warn(self, text: str, error: Exception) -> None:
        """Warn of an error, once; raise it if `strict`."""
        if self.strict:
            raise error
        line = f"train.compile: {text}: {shortened(f'{type(error).__name__}: {error}', SHOWN)}"
        if line not in self._told:
            self._told.add(line)
            logger.warning(line)

    def on_step(self, seconds: float, *, shown: bool = True) -> None:
        """Log, if `shown`, how many graphs a step that took `seconds` has compiled."""
        new, self._reported = self.graphs - self._reported, self.graphs
        if new and shown:
            what = f"compiled {counted(new, 'graph')} with {self.name}"
            logger.info(f"train.compile: {what} in a step of {seconds:.1f} s")


class _Function:
    """A function of a module and its arguments, compiled on its first call."""

    def __init__(self, eager: Callable[..., Any], compilation: Compilation) -> None:
        self.eager, self.compilation = eager, compilation
        self.compiled: Callable[..., Any] | None = torch.compile(eager, dynamic=False, backend=compilation)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        if self.compiled is not None:
            try:
                found = self.compiled(module, *args, **kwargs)
                return tree_map_only(torch.Tensor, torch.clone, found) if self.compilation.cuda_graphs else found
            except TorchDynamoException as error:  # raised by the capture, or again below by the code itself
                failure = error
            self.compiled = None
            self.compilation.warn(f"{type(module).__name__} cannot be compiled and runs eagerly", failure)
        return self.eager(module, *args, **kwargs)


def compile_towers(
    towers: Any, parts: Parts, backend: str = "inductor", mode: str | None = None, *, cache: Path | None = None
) -> Compilation:
    """Let parts of the towers compile on their first call, in place; to be called before they are sharded.

    Calls that may compile belong in `compiling`, which sets torch's configuration for them. What is set for the whole
    process is $TORCHINDUCTOR_CACHE_DIR, to `cache`: inductor and its worker processes read it at each compilation.

    Args:
        parts: 'blocks', each repeated block; 'towers', each tower without what is around its blocks; 'step', the pass
            from pixels and token ids to normalised features as one graph, or, with text buckets, from pixels to image
            features as one, and of the text tower as with 'towers', whose buckets differ from step to step.
        backend: of torch.compile.
        mode: of inductor: 'default', 'reduce-overhead', 'max-autotune' or 'max-autotune-no-cudagraphs'. With those that
            record CUDA graphs, texts pass in one bucket: each sequence of shapes is recorded anew.
        cache: folder in which inductor and Triton keep compiled code, unless the environment names another one
            ($TORCHINDUCTOR_CACHE_DIR) or it cannot be written; one in the system's temporary folder unless given.

    Raises SettingsError: there is no such backend, no tower has repeated blocks, or texts are to be packed.
    """
    if cache is not None:
        _keep_in(cache)
    cuda_graphs = backend == "inductor" and mode in CUDA_GRAPHS
    compilation = Compilation(_compiler(backend, mode), backend, cuda_graphs=cuda_graphs)
    found = _targets(towers, parts)
    if towers.text_buckets is not None:
        if towers.text_buckets.packed == "all":
            advice = "use auto (buckets), or --train.compile off"
            raise SettingsError(f"model.text_buckets: packed texts are not supported with train.compile: {advice}")
        compilation.text_buckets = towers.text_buckets
        towers.text_buckets = replace(towers.text_buckets, portions=1 if cuda_graphs else PORTIONS, packed=None)
    functions: dict[Any, _Function] = {}
    for module, name in found:
        replaced = vars(module).get(name)  # by activation checkpointing
        eager = getattr(type(module), name) if replaced is None else replaced.__func__
        if eager not in functions:
            functions[eager] = _Function(eager, compilation)
        setattr(module, name, MethodType(functions[eager], module))
    return compilation


@contextmanager
def compiling(compilation: Compilation | None) -> Iterator[None]:
    """A context in which towers may be called that compile: a step, whose beginning CUDA graphs are told of.

    In it, torch's limit of compilations of a function is raised, and DDP's splitting of graphs is off: it takes no
    graph with activation checkpointing, and blocks are graphs of their own. At its end the backends of attention are
    those of before: a compiled recomputation that ends early leaves its own.
    """
    if compilation is None:
        yield
        return
    import torch._dynamo.config as config

    if compilation.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    limit = max(GRAPHS, config.recompile_limit)
    with config.patch(optimize_ddp=False, recompile_limit=limit), sdpa_kernel(enabled_backends()):
        yield


def eagerly(compilation: Compilation | None) -> AbstractContextManager[Any]:
    """A context in which compiled towers run eagerly, for shapes that do not recur."""
    return nullcontext() if compilation is None else torch.compiler.set_stance("force_eager")


def _keep_in(cache: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its own default when dynamo is imported, and reads it each time.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") not in (None, os.path.abspath(default_cache_dir())):
        return
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


def _targets(towers: Any, parts: Parts) -> list[tuple[nn.Module, str]]:
    """The modules that are compiled, each with the name of its method. Raises SettingsError: there is none."""
    text = getattr(towers.clip, "text", towers.clip)  # of its tower, all but the embeddings
    present = {"image": getattr(towers.clip, "visual", None), "text": getattr(text, "transformer", None)}
    kinds = {kind: module for kind, module in present.items() if isinstance(module, nn.Module)}
    if parts == "step" and (towers.text_buckets is None or "text" not in kinds):
        return [(towers, "forward")]
    found: list[tuple[nn.Module, str]] = []
    for kind, tower in kinds.items():
        if parts == "step" and kind == "image":
            found.append((towers, "encode_image"))
            continue
        own = blocks(tower) if parts == "blocks" else [tower]
        if not own:
            name = f"{type(tower).__name__} ({kind} tower)"
            logger.warning(f"train.compile: {name} has no repeated blocks and runs eagerly; `towers` compiles it whole")
        found += [(module, "forward") for module in own]
    if not kinds:
        logger.warning("train.compile: no effect, as the features of both towers come from stores")
    elif not found:
        raise NOTHING_COMPILED.error("train.compile")
    return found


def _compiler(backend: str, mode: str | None) -> Compiler:
    if backend == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        # Inductor's own random numbers would differ between graphs with and without gradients.
        options = {**list_mode_options(mode or "default"), "fallback_random": True}
        inductor: Any = partial(compile_fx, config_patches=options)
        return cast(Compiler, inductor)
    from torch._dynamo import list_backends, lookup_backend

    try:
        found: Compiler = lookup_backend(backend)
    except Exception as error:  # InvalidBackend, or one of the backend's own imports
        names, why = ", ".join(sorted(list_backends(exclude_tags=()))), shortened(str(error), SHOWN)
        raise SettingsError(f"train.compile_backend: torch has no {backend!r} ({why}): {names}") from error
    return found
