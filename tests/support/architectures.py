"""Which KV-cache specs each architecture of vLLM's registry can ask for, read from vLLM's source.

Most models cannot be built here: their configuration classes come with their weights, and their
kernels need a GPU. So the source is followed instead, from the class that the registry names over
the classes and functions that it uses to the layers that say what they keep of a token
(`get_kv_cache_spec`). A layer that a configuration can turn on counts, whatever the default is.

    python -m tests.support.architectures [FOLDERS OF VLLM'S PACKAGE] > docs/use/architectures.md
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

INTERFACE = "vllm.v1.kv_cache_interface"
REGISTRY = "vllm.model_executor.models.registry"
METHOD = "get_kv_cache_spec"

FOLLOWED = (
    "vllm.model_executor.models",
    "vllm.models",
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.attention_layer_base",
    "vllm.model_executor.layers.kda",
    "vllm.model_executor.layers.lightning_attn",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.mla",
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.v1.attention.backends.mla",
)
"""Modules whose definitions are followed: models, and layers that keep something of a token."""

RUNNERS = ("vllm.v1.worker", "vllm.v1.executor", INTERFACE)
"""Modules with functions of that name that collect what layers say."""

LISTS = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "multimodal",
    "_SPECULATIVE_DECODING_MODELS": "draft",
    "_TRANSFORMERS_BACKEND_MODELS": "text",
}
"""The registry's lists of models that generate tokens, and what they hold."""

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign
Place: TypeAlias = "tuple[Module, Definition]"


@dataclass(frozen=True)
class Architecture:
    """One name of the registry."""

    name: str
    kind: str
    module: str
    class_name: str
    specs: frozenset[str] = frozenset()
    """Names of the specs that its layers can ask for; empty where it only wraps another model."""


@dataclass(eq=False)
class Module:
    """A module of vLLM, parsed: what its names stand for at top level and in its functions."""

    name: str
    tree: ast.Module
    is_package: bool
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take(self.tree.body)

    def _take(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If):
                self._take(node.body)
                self._take(node.orelse)  # last: what stays is the branch for CUDA
            elif isinstance(node, ast.Try):
                self._take(node.body)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.definitions[target.id] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.update(self.imported(node))

    def imported(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None]]:
        """Return by local name the module and the name in it that a statement imports."""
        if isinstance(node, ast.Import):
            return {a.asname: (a.name, None) for a in node.names if a.asname}
        base = node.module or ""
        if node.level:
            parts = self.name.split(".")
            parts = parts[: len(parts) - node.level + self.is_package]
            base = ".".join([*parts, base] if base else parts)
        return {alias.asname or alias.name: (base, alias.name) for alias in node.names}


class Source:
    """The source of one vLLM."""

    def __init__(self, package: Path) -> None:
        self._root = package.parent
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def installed(cls) -> Source:
        """Return that of the vLLM that Python would import; it is not imported."""
        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        return cls(Path(spec.origin).parent)

    def module(self, name: str) -> Module | None:
        """Return a parsed module; None if there is none of this name."""
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            file, is_package = path.with_suffix(".py"), False
            if (path / "__init__.py").exists():
                file, is_package = path / "__init__.py", True
            exists = name.startswith("vllm") and file.exists()
            tree = ast.parse(file.read_text()) if exists else None
            self._modules[name] = Module(name, tree, is_package) if tree is not None else None
        return self._modules[name]

    def resolve(self, module: Module, name: str) -> Place | None:
        """Return where a name of a module is defined, over any number of imports."""
        for _ in range(8):
            if name in module.definitions:
                return module, module.definitions[name]
            target = module.imports.get(name)
            if target is None or target[1] is None:
                return None
            found = self.module(target[0])
            if found is None:
                return None
            module, name = found, target[1]
        return None

    @cached_property
    def specs(self) -> dict[str, list[str]]:
        """The specs of vLLM, each with the names of its bases."""
        module = self.module(INTERFACE)
        assert module is not None
        bases = {
            node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
            for node in module.definitions.values()
            if isinstance(node, ast.ClassDef)
        }
        found: dict[str, list[str]] = {"KVCacheSpec": []}
        for name, of in bases.items():
            if any(base in found for base in of):
                found[name] = of
        return found

    def registered(self) -> Iterator[Architecture]:
        """Yield the architectures of the registry that generate tokens, without their specs."""
        module = self.module(REGISTRY)
        assert module is not None
        for list_name, kind in LISTS.items():
            node = module.definitions[list_name]
            assert isinstance(node, ast.Assign)
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert key is not None
                module_name, class_name = ast.literal_eval(value)
                if not module_name.startswith("vllm."):
                    module_name = f"vllm.model_executor.models.{module_name}"
                yield Architecture(ast.literal_eval(key), kind, module_name, class_name)

    @cached_property
    def _place_of(self) -> dict[str, tuple[str, str]]:
        return {found.name: (found.module, found.class_name) for found in self.registered()}

    def architectures(self) -> list[Architecture]:
        """Return the architectures of the registry that generate tokens, with their specs."""
        with _without_collections():
            return [
                Architecture(
                    *(found.name, found.kind, found.module, found.class_name),
                    specs=self.specs_of(found.module, found.class_name),
                )
                for found in self.registered()
            ]

    def specs_of(self, module_name: str, class_name: str) -> frozenset[str]:
        """Return the specs that layers ask for which a class can use, itself and over others."""
        todo = [(self._registered_class(module_name, class_name), True)]
        seen = set(todo)
        found: set[str] = set()
        while todo:
            place, is_used = todo.pop()
            if is_used and isinstance(place[1], ast.ClassDef):
                found |= self.specs_of_layer(place)
            new = self._used(place) - seen
            seen |= new
            todo += new
        return frozenset(found)

    def _registered_class(self, module_name: str, class_name: str) -> Place:
        module = self.module(module_name)
        assert module is not None, f"the registry names {module_name}, which is no module"
        place = self.resolve(module, class_name)
        assert place is not None, f"{module_name} has no {class_name}, which the registry names"
        return place

    @cache  # noqa: B019
    def _used(self, place: Place) -> frozenset[tuple[Place, bool]]:
        """Return what a definition uses, and whether it may make one: not of its own bases."""
        return frozenset(self._uses(*place))

    def _uses(self, module: Module, node: Definition) -> Iterator[tuple[Place, bool]]:
        names = _Names(module)
        if isinstance(node, ast.ClassDef):
            for statement in [*node.body, *node.decorator_list]:
                names.visit(statement)
            for base in node.bases:
                for name in [n.id for n in ast.walk(base) if isinstance(n, ast.Name)]:
                    yield from ((place, False) for place in self._follow(module, name, {}))
        else:
            names.visit(node)
        for name in names.found:
            yield from ((place, True) for place in self._follow(module, name, names.imports))
        for owner, name in names.attributes:
            source, attribute = (names.imports | module.imports).get(owner, ("", None))
            owned = self.module(f"{source}.{attribute}" if attribute else source)
            if owned is not None:
                yield from ((place, True) for place in self._follow(owned, name, {}))
        for architecture in names.architectures & self._place_of.keys():
            yield self._registered_class(*self._place_of[architecture]), True

    def _follow(
        self, module: Module, name: str, imports: dict[str, tuple[str, str | None]]
    ) -> Iterator[Place]:
        if name in imports:
            source, attribute = imports[name]
            imported = self.module(source)
            place = imported and attribute and self.resolve(imported, attribute)
        else:
            place = self.resolve(module, name)
        if place and any(place[0].name.startswith(prefix) for prefix in FOLLOWED):
            yield place

    @cache  # noqa: B019
    def specs_of_layer(self, place: Place) -> frozenset[str]:
        """Return the specs that a class asks for as a layer; none if it is no layer."""
        module, node = place
        assert isinstance(node, ast.ClassDef)
        method = next((n for n in node.body if getattr(n, "name", "") == METHOD), None)
        found: set[str] = set()
        if method is not None:
            used = {n.id for n in ast.walk(method) if isinstance(n, ast.Name)}
            found |= used & self.specs.keys() - {"KVCacheSpec", "AttentionSpec"}
            if "super" not in used:
                return frozenset(found)
        for base in node.bases:
            if isinstance(base, ast.Name):
                inherited = self.resolve(module, base.id)
                if inherited is not None and isinstance(inherited[1], ast.ClassDef):
                    found |= self.specs_of_layer(inherited)
        return frozenset(found)

    def layers(self) -> dict[str, set[str]]:
        """Return by module the classes of the package that say what they keep of a token."""
        found: dict[str, set[str]] = defaultdict(set)
        for file in (self._root / "vllm").rglob("*.py"):
            name = ".".join(file.relative_to(self._root).with_suffix("").parts)
            text = "" if name.startswith(RUNNERS) else file.read_text()
            if f"def {METHOD}(" not in text:
                continue
            with _without_collections():
                tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and any(
                    getattr(method, "name", "") == METHOD for method in node.body
                ):
                    found[name].add(node.name)
        return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: trees have many nodes, and that would take most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Names(ast.NodeVisitor):
    """Collects the names that code uses, but those of annotations and of types to compare with."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.found: set[str] = set()
        self.imports: dict[str, tuple[str, str | None]] = {}
        self.attributes: set[tuple[str, str]] = set()
        self.architectures: set[str] = set()
        """Of models that the code has the registry build."""

    def visit_Name(self, node: ast.Name) -> None:
        self.found.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.attributes.add((node.value.id, node.attr))
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        pass  # its annotation

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        for part in [*node.body, *node.decorator_list, *defaults]:
            self.visit(part)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.update(self._module.imported(node))

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        if name in ("isinstance", "issubclass", "cast", "get_layers_from_vllm_config"):
            node = ast.Call(node.func, node.args[:1] if name != "cast" else node.args[1:], [])
        if name == "init_vllm_registered_model":
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self.architectures.add(part.value)
        self.generic_visit(node)


NAMES = {
    "FullAttentionSpec": "attention",
    "SlidingWindowSpec": "windows",
    "ChunkedLocalAttentionSpec": "chunks",
    "MLAAttentionSpec": "latents",
    "SlidingWindowMLASpec": "windows of latents",
    "MambaSpec": "states",
    "CircularBufferSpec": "rings",
    "KpoolTailSpec": "rings",
    "HiddenStateCacheSpec": "hidden states",
    "CrossAttentionSpec": "cross attention",
    "RSWASpec": "reference windows",
    "SinkFullAttentionSpec": "sinks",
}
"""What the table calls the layers with a spec."""

HEAD = """# Architectures

What the layers of each architecture of vLLM can keep, in any configuration, and whether kv-offload
serves it. A model is refused at startup only if it has a layer of the kind named here.
[support.md](support.md) has the kinds, and what else is refused.

Made by `python -m tests.support.architectures` from the source of vLLM 0.33, and from 0.32 and 0.31
for architectures that 0.33 has dropped. `tests/kv_offload/engines/test_architectures.py` compares
it with the installed vLLM.

| layers | served | architectures |
|---|---|---|
"""


def describe(specs: frozenset[str]) -> str:
    """Return the words of the table for layers with these specs."""
    words = [word for spec, word in NAMES.items() if spec in specs]
    unknown = sorted(specs - NAMES.keys())
    return ", ".join(dict.fromkeys([*words, *unknown])) or "those of the model that it wraps"


def table(architectures: Iterable[Architecture], refused: Collection[str]) -> str:
    """Return the rows of the table, those with the most architectures first."""
    by_words: dict[str, list[Architecture]] = defaultdict(list)
    for found in architectures:
        by_words[describe(found.specs)].append(found)
    rows = []
    for words, members in sorted(by_words.items(), key=lambda row: (-len(row[1]), row[0])):
        specs = frozenset[str]().union(*(found.specs for found in members))
        without = describe(specs & frozenset(refused)) if specs & frozenset(refused) else ""
        names = " ".join(sorted(f"`{found.name}`" for found in members))
        rows.append(f"| {words} | {f'without {without}' if without else 'yes'} | {names} |\n")
    return "".join(rows)


def main() -> None:
    from kv_offload.engines.vllm.start.support import REFUSED_SPECS

    folders = [Path(folder) for folder in sys.argv[1:]]
    found: dict[str, Architecture] = {}
    for source in map(Source, folders) if folders else [Source.installed()]:
        found |= {one.name: one for one in source.architectures()}  # the last folder decides
    sys.stdout.write(HEAD + table(found.values(), REFUSED_SPECS))


if __name__ == "__main__":
    main()
