"""Reading a Hugging Face configuration: every field is checked, nothing is guessed in silence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.bounds import FIELDS, LONGEST_TEXT, MOST_LISTED, MOST_TEXTS, quantity
from twin.models.foreign import INSTEAD, format_of_config
from twin.models.spec import DType, Rope, RopeScaling, RopeStyle
from twin.models.yarn import magnitude
from twin.text import shown

LONGEST_KEY = 64  # characters; those that families have are shorter
_DTYPES = {"float16": DType.FP16, "bfloat16": DType.BF16, "float32": DType.FP32}


def spelt(key: str) -> str:
    """A key in an error: as it is written, unless it could be anything."""
    return key if key.isidentifier() and len(key) <= LONGEST_KEY else shown(key)


@dataclass(slots=True)
class Record:
    """Which keys of a mapping a reader looked at, and the records of the parts that it opened."""

    keys: set[str] = field(default_factory=set)
    parts: dict[str, Record] = field(default_factory=dict)


@frozen
class Config:
    """A configuration mapping and the name that its errors carry. A field set to null counts as
    absent.

    `record` notes what is read, so that `unread` can name what nobody looked at.
    """

    name: str
    values: Mapping[str, object]
    record: Record = field(default_factory=Record, compare=False, repr=False)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: object = None) -> object:
        """The value as it stands, unchecked."""
        self.record.keys.add(key)
        return self.values[key] if key in self else default

    def unused(self, *keys: str) -> None:
        """Keys that say nothing here, because of what another key says."""
        self.record.keys.update(keys)

    def ignored(self) -> None:
        """All keys of this part, and of the parts in it."""
        self.record.parts.clear()
        self.unused(*self)

    def changed(
        self, values: Mapping[str, object] | None = None, without: Collection[str] = ()
    ) -> Config:
        """The same with other values, read on behalf of this one."""
        self.record.keys.update(without)
        kept = {key: value for key, value in self.values.items() if key not in without}
        return replace(self, values={**kept, **(values or {})})

    def holding(self, key: str, part: Config) -> Config:
        """A configuration with nothing but a part of this one, under another key."""
        return Config(self.name, {key: part.values}, Record(parts={key: part.record}))

    def unread(self) -> Iterator[tuple[Config, str]]:
        """What nobody looked at: a configuration (this one, or one of its parts) and a key."""
        for key in self:
            part, value = self.record.parts.get(key), self.values[key]
            if part is not None and isinstance(value, Mapping):
                yield from Config(f"{self.name}: {spelt(key)}", value, part).unread()
            elif key not in self.record.keys:
                yield self, key

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self.values.items() if value is not None)

    def refuse(
        self, key: str, allowed: str, next_step: str = "correct the configuration"
    ) -> ConfigError:
        """The error for a field whose value cannot be used."""
        return ConfigError(
            f"{self.name}: {spelt(key)} is {shown(self.values.get(key))}; allowed: {allowed}; "
            f"{next_step}"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero, within the field's range."""
        return self._whole(key, default, 1)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from zero, within the field's range."""
        return self._whole(key, default, 0)

    def _whole(self, key: str, default: int | None, least: int) -> int:
        limits = FIELDS[key]
        least = max(least, round(limits.lowest))
        allowed = f"a whole number from {least} to {quantity(limits.highest)} ({limits.reason})"
        kind = Annotated[int, Meta(ge=least, le=int(limits.highest))]
        return int(self._read(key, default, kind, allowed))

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from zero, each within the field's range."""
        limits = FIELDS[key]
        allowed = (
            f"a list of whole numbers from 0 to {quantity(limits.highest)}, at most {MOST_LISTED} "
            f"({limits.reason})"
        )
        one: Any = Annotated[int, Meta(ge=0, le=int(limits.highest))]
        kind = Annotated[tuple[one, ...], Meta(max_length=MOST_LISTED)]
        return tuple(self._read(key, None, kind, allowed))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where the field is absent."""
        found: tuple[str, ...] = self._read(key, (), tuple[str, ...], "a list of texts")
        if len(found) > MOST_TEXTS or any(len(one) > LONGEST_TEXT for one in found):
            raise self.refuse(
                key,
                f"up to {MOST_TEXTS} texts of up to {LONGEST_TEXT} characters",
                "shorten it with patterns",
            )
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A number within the field's range."""
        kind, allowed = _real(key)
        return float(self._read(key, default, kind, f"a number {allowed}"))

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers, each within the field's range."""
        one, allowed = _real(key)
        kind = Annotated[tuple[one, ...], Meta(min_length=count, max_length=count)]  # type: ignore[valid-type]
        return tuple(self._read(key, None, kind, f"a list of {count} numbers {allowed}"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._read(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        found: str = self._read(key, default, str, "text")
        if len(found) > LONGEST_TEXT:
            raise self.refuse(key, f"up to {LONGEST_TEXT} characters")
        return found

    def part(self, key: str) -> Config | None:
        """A mapping inside the configuration, or None if absent."""
        if key not in self:
            return None
        value = self.values[key]
        if not isinstance(value, Mapping):
            raise self.refuse(key, "a mapping or null")
        record = self.record.parts.setdefault(key, Record())
        return Config(f"{self.name}: {spelt(key)}", value, record)

    def require(
        self, key: str, default: object, allowed: tuple[object, ...], next_step: str
    ) -> None:
        """Refuse a field that selects something the engine does not do. Types count: 0 is not
        false, 1.0 is not 1.
        """
        said = self.get(key)
        value = default if said is None else said
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refuse(key, " or ".join(repr(a) for a in allowed), next_step)

    def divides(self, key: str, value: int, by: str, divisor: int) -> int:
        """`value` / `divisor`, refused unless exact."""
        if value % divisor:
            raise ConfigError(
                f"{self.name}: {key} is {value}; allowed: multiples of {by} = {divisor}; correct "
                "one of the two"
            )
        return value // divisor

    def _read(self, key: str, default: object, kind: Any, allowed: str) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(
                f"{self.name}: {key} is missing; allowed: {allowed}; take it from the model's "
                "config.json"
            )
        try:
            return convert(value, kind)
        except (ValidationError, UnicodeError):  # of half a character, too
            raise self.refuse(key, allowed) from None


def _real(key: str) -> tuple[Any, str]:
    """The type of a field's number, and its range in words."""
    limits = FIELDS[key]
    allowed = f"from {quantity(limits.lowest)} to {quantity(limits.highest)} ({limits.reason})"
    return Annotated[float, Meta(ge=limits.lowest, le=limits.highest)], allowed


_SHARED = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")


def text_of(config: Config, kinds: tuple[str, ...]) -> Config:
    """The text model's configuration in that of a model with other towers: its `text_config`, with
    what the whole says of all parts. Raises ConfigError where the two contradict each other.
    """
    text = config.part("text_config")
    if text is None:
        raise ConfigError(
            f"{config.name}: text_config is missing; allowed: a {kinds[0]} configuration; take it "
            "from the model's config.json"
        )
    text.require(
        "model_type", kinds[0], kinds, "other text models behind such a tower are not described"
    )
    shared = {key: config.get(key) for key in _SHARED if key in config}
    for key, value in shared.items():
        if key in text and text.values[key] != value:
            said = f"the same as text_config.{key}, {shown(text.values[key])}"
            raise config.refuse(key, said, "remove one of the two")
    return Config(config.name, {"model_type": kinds[0], **text.values, **shared}, text.record)


def refuse_quantized(config: Config) -> None:
    """Of a family that the engine runs in 16 or 32 bits only. The refusal names the format, not all
    of its settings.
    """
    if "quantization_config" not in config:
        return
    part = config.part("quantization_config")
    assert part is not None
    part.text("quant_method", "")  # a text, and not an endless one
    raise ConfigError(
        f"{config.name}: quantization_config says {format_of_config(part.values)}; allowed: none, "
        "or 8 bits as compressed-tensors and DeepSeek's FP8 blocks store them, or 4 bits as "
        f"compressed-tensors, AWQ and GPTQ do in groups of 32, 64 or 128; {INSTEAD}"
    )


def dtype(config: Config) -> DType:
    """The checkpoint's storage type: `dtype` (transformers 5) or `torch_dtype`; BF16 where neither
    is written.
    """
    names = [
        config.text(key).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in config
    ]
    if len(set(names)) > 1:
        raise config.refuse("torch_dtype", f"the same as dtype, {shown(names[0])}")
    if names and names[0] not in _DTYPES:
        raise ConfigError(
            f"{config.name}: dtype is {shown(names[0])}; allowed: {', '.join(_DTYPES)}; convert "
            "the checkpoint"
        )
    return _DTYPES[names[0]] if names else DType.BF16


def rope(
    config: Config,
    *,
    theta: float | None,
    style: RopeStyle = RopeStyle.HALF,
    simulated: bool = False,
    yarn: bool = True,
) -> Rope:
    """Rotary embedding from `rope_theta` and `rope_scaling`, or from `rope_parameters`
    (transformers 5).

    `theta` is the family's class default; None means that the configuration must say it.
    `simulated`: of a family that the engine does not run, where partial rotation (which the mixers
    tell) passes. `yarn`: the family may have it.
    """
    parameters, scaling = config.part("rope_parameters"), config.part("rope_scaling")
    for holder in (config, parameters, scaling):
        if holder and not simulated:
            holder.require(
                "partial_rotary_factor", 1.0, (1, 1.0), "this family rotates whole heads"
            )
    base = _theta(config, parameters, scaling, theta)
    if parameters and scaling and _scaling(parameters, yarn) != _scaling(scaling, yarn):
        raise config.refuse(
            "rope_scaling",
            f"the same as rope_parameters, {shown(parameters.values)}",
            "remove one of the two",
        )
    used = parameters or scaling
    scaled = _scaling(used, yarn) if used else None
    if scaled and scaled.kind == "yarn" and base <= 1:
        raise ConfigError(
            f"{config.name}: rope_theta is {base:g}; allowed: above 1 with yarn, which "
            "distinguishes pairs by their turns; correct the configuration"
        )
    return Rope(base, style, scaled)


def rotated(config: Config, head_dim: int, share: float) -> int | None:
    """Rotated elements of a head, None for all: `partial_rotary_factor`, in rope_parameters since
    transformers 5. `share`: the family's default.
    """
    parts = (config.part("rope_scaling"), config.part("rope_parameters"))
    holder = next((part for part in parts if part and "partial_rotary_factor" in part), config)
    share = holder.real("partial_rotary_factor", share)
    count = int(head_dim * share)
    if share > 1 or count < 2 or count % 2:
        raise holder.refuse(
            "partial_rotary_factor", "a share of a head, up to 1, of an even number of elements"
        )
    return None if count == head_dim else count


def _theta(
    config: Config, parameters: Config | None, scaling: Config | None, default: float | None
) -> float:
    for part, key in ((parameters, "rope_parameters"), (scaling, "rope_scaling")):
        if part and "rope_theta" in part:
            inner = part.real("rope_theta")
            if "rope_theta" in config and config.real("rope_theta") != inner:
                raise config.refuse("rope_theta", f"the same as {key}.rope_theta, {inner:g}")
            return inner
    # rope_parameters without a theta is no old configuration: the class default does not apply
    return config.real("rope_theta", None if parameters else default)


def _scaling(config: Config, yarn: bool) -> RopeScaling | None:
    """`rope_type`, called `type` before transformers 4.43."""
    kinds = [config.text(key) for key in ("rope_type", "type") if key in config]
    if len(set(kinds)) > 1:
        raise config.refuse("type", f"the same as rope_type, {shown(kinds[0])}")
    kind = kinds[0] if kinds else "default"
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", config.real("factor"))
        case "llama3":
            return llama3_scaling(config)
        case "yarn" if yarn:
            return _yarn(config)
        case _:
            known = "default, linear, llama3" + (", yarn" if yarn else "")
            raise ConfigError(
                f"{config.name}: rope_type is {shown(kind)}; allowed: {known}; use a checkpoint "
                "without it"
            )


def _yarn(config: Config) -> RopeScaling:
    """As transformers reads it; zero turns mean the default."""
    factor = config.real("factor")
    said = config.real("attention_factor") if "attention_factor" in config else None
    fast, slow = config.real("beta_fast", 32.0) or 32.0, config.real("beta_slow", 1.0) or 1.0
    if fast < slow:
        raise config.refuse("beta_fast", f"at least beta_slow, {slow:g}")
    return RopeScaling(
        "yarn",
        factor,
        original_context=config.count("original_max_position_embeddings"),
        fast_turns=fast,
        slow_turns=slow,
        truncate=config.flag("truncate", True),
        magnitude=magnitude(
            factor, said, config.real("mscale", 0.0), config.real("mscale_all_dim", 0.0)
        ),
    )


def llama3_scaling(config: Config) -> RopeScaling:
    """Llama 3's four numbers; the high frequency factor must exceed the low one."""
    low, high = config.real("low_freq_factor"), config.real("high_freq_factor")
    if high <= low:
        raise config.refuse("high_freq_factor", f"above low_freq_factor, {low:g}")
    return RopeScaling(
        "llama3", config.real("factor"), low, high, config.count("original_max_position_embeddings")
    )
