"""What a `quantization_config` stores in which format, matrix by matrix, and the same model in
another format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.config import Config
from twin.models.formats import FP32, Format, Formats, Role, format_named
from twin.models.modules import HEAD, KEPT, PREFIXES, Module, Table, modules
from twin.models.patterns import Patterns, Style, names_single_experts
from twin.models.spec import ModelSpec
from twin.text import shown


@frozen
class Named:
    """Modules that a list of a configuration names."""

    texts: tuple[str, ...] = ()
    style: Style = Style.NAMES


@frozen
class Part:
    """Modules that a quantization stores in one format: its targets, less what it leaves out."""

    format: Format
    targets: Named | None = None  # None: all of `roles`
    left_out: Named = Named()
    roles: tuple[Role, ...] = tuple(role for role in Role if role not in KEPT)


@frozen
class Quantization:
    """What a `quantization_config` says of matrices: of parts that claim a module the first has it.

    `head`: the LM head is quantized unless something leaves it out, which the engine does not read.
    """

    parts: tuple[Part, ...]
    head: bool = False

    def lists(self) -> Iterator[Named]:
        for part in self.parts:
            yield part.left_out
            if part.targets is not None:
                yield part.targets


def stored_formats(
    config: Config,
    spec: ModelSpec,
    table: Table,
    quantization: Quantization | None,
    *,
    by_layer: tuple[Role, ...] = (),
) -> Formats | None:
    """The formats of a model's matrices by kind; None without quantization. `table`: what they are
    called in the family's checkpoints. `by_layer`: kinds of which layers may differ.

    Raises ConfigError where two matrices of another kind differ, or two of one layer, by their
    names. Hyper-connections are FP32.
    """
    kept = Formats(format_named(spec.dtype.value), ((Role.HYPER, FP32),) if spec.hyper else ())
    if quantization is None:
        return kept if kept.chosen else None
    judge = _Judge(config, spec, table, quantization)
    judge.check_head()
    for role, format in judge.by_role(by_layer).items():
        kept = kept if format is None else kept.with_role(role, format)
    judge.check_lists()
    return judge.with_layers(kept, by_layer)


def requantized(spec: ModelSpec, format: Format) -> ModelSpec:
    """The same model with its attention, feed-forward layers and experts stored in `format`; the
    rest as it was.
    """
    stored = spec.formats
    for role in Role:
        if role not in KEPT:
            stored = stored.with_role(role, format)
    return replace(spec, name=f"{spec.name}@{format.name}", stored=stored)


class _Judge:
    """Every matrix of every layer, by what a quantization says of it."""

    def __init__(
        self, config: Config, spec: ModelSpec, table: Table, quantization: Quantization
    ) -> None:
        self.config, self.spec, self.quantization = config, spec, quantization
        self.owner = f"{config.name}: quantization_config"
        lists = [named for named in dict.fromkeys(quantization.lists()) if named.texts]
        each = any(names_single_experts(named.texts, named.style) for named in lists)
        self.modules = list(modules(spec, table, each_expert=each))
        self.known = {word for name in table.values() for word in name.split(".")}
        tried = len(self.modules) * len(PREFIXES)
        self.patterns = {
            named: Patterns(self.owner, named.texts, named.style, tried) for named in lists
        }

    def of(self, module: Module) -> Format | None:
        """The format of a module; None: it is left as it was."""
        for part in self.quantization.parts:
            if module.role in part.roles and self._claims(part, module.names):
                return part.format
        return None

    def by_role(self, by_layer: tuple[Role, ...]) -> dict[Role, Format | None]:
        """Of kinds that layers have alike. Raises ConfigError where one of them has two formats, or
        another kind has two in a layer.
        """
        first: dict[tuple[Role, int | None], tuple[Module, Format | None]] = {}
        for module in self.modules:
            found, layer = self.of(module), module.layer if module.role in by_layer else None
            other, format = first.setdefault((module.role, layer), (module, found))
            if found != format:
                plain = self.spec.dtype.value
                raise ConfigError(
                    f"{self.owner}: stores {other.name} in {format.name if format else plain} and "
                    f"{module.name} in {found.name if found else plain}; allowed: one format for "
                    f"all matrices of a kind ({module.role.value}); use another checkpoint"
                )
        return {role: format for (role, layer), (_, format) in first.items() if layer is None}

    def with_layers(self, kept: Formats, by_layer: tuple[Role, ...]) -> Formats:
        """The same with the kinds of which layers may differ: by kind where they do not."""
        found = {(m.role, m.layer): self.of(m) or kept.rest for m in self.modules}
        differ = set()
        for role in by_layer:
            forms = {form for (of, _), form in found.items() if of is role}
            if len(forms) == 1:
                kept = kept.with_role(role, *forms)
            elif forms:
                differ.add(role)
        if not differ:
            return kept
        layers = tuple(
            tuple(
                (weight.name, found[weight.role, layer])
                for weight in self.spec.layer_weights(layer)
                if weight.role in differ
            )
            for layer in range(self.spec.layers)
        )
        return replace(kept, layers=layers)

    def check_head(self) -> None:
        """The engine multiplies the head in 16 bits."""
        names = (HEAD, *(prefix + HEAD for prefix in PREFIXES if prefix), "head")
        if self.quantization.head and any(self._claims(p, names) for p in self.quantization.parts):
            raise ConfigError(
                f"{self.owner}: leaves {HEAD} quantized; allowed: a list of exceptions (ignore) "
                f"with {HEAD!r}, because the engine multiplies the head in 16 bits; use another "
                "checkpoint"
            )

    def check_lists(self) -> None:
        """Raises ConfigError for the name of a matrix in a spelling that we do not know, or that
        its method takes for nothing.
        """
        every = {name for module in self.modules for name in module.names}
        for named in self.patterns:
            for text in named.texts:
                if self._spelt_otherwise(text, named.style) and not _hits(text, named.style, every):
                    raise ConfigError(
                        f"{self.owner}: names {shown(text)}, which is no matrix of this model; "
                        f"allowed: {', '.join(sorted(self._examples()))} and so on; correct the "
                        "name, or use another checkpoint"
                    )

    def _examples(self) -> set[str]:
        return {PREFIXES[0] + module.name for module in self.modules[:2]}

    def _claims(self, part: Part, names: Sequence[str]) -> bool:
        if part.targets is not None and not self._in(part.targets, names):
            return False
        return not self._in(part.left_out, names)

    def _in(self, named: Named, names: Sequence[str]) -> bool:
        return named in self.patterns and self.patterns[named].any(names)

    def _spelt_otherwise(self, text: str, style: Style) -> bool:
        """Of a name of a decoder's layer or matrix, not of a tower, a draft or a norm: is it called
        otherwise than here? A matrix that this layer only lacks is not.
        """
        parts = text.strip("*.").split(".")
        if text.startswith("re:") or "layers" not in parts or _ELSEWHERE & set(_words(text)):
            return False
        at = parts.index("layers")
        number, last = "".join(parts[at + 1 : at + 2]), parts[-1]
        if number.isdecimal() and int(number) >= self.spec.layers:
            return False  # a draft
        before = ".".join(parts[:at])
        known = f"{before}." if before else "", f"{before.lstrip('*')}."
        if last in _FUSED - self.known or (last in _WHOLE and style is Style.EXACT):
            return True
        return not set(known) & set(PREFIXES) and (last == number or last in self.known)


_FUSED = {"qkv_proj", "gate_up_proj"}
_WHOLE = {"attn", "self_attn", "mlp", "experts"}  # of which compressed-tensors takes no name
_ELSEWHERE = {
    *("vision", "visual", "image", "audio", "video", "speech", "encoder", "projector", "mtp"),
    *("draft", "eagle", "medusa", "merger", "perceiver", "aligner", "resampler", "tower"),
}


def _words(text: str) -> list[str]:
    return text.replace(".", "_").split("_")


def _hits(text: str, style: Style, every: set[str]) -> bool:
    """Whether one text of a list names any of these."""
    if text in every:
        return True
    alone = Patterns("", (text,), style)
    return any(map(alone.match, every))
