"""Kinds of models that a twin may know differently well: engine runs of each say how well."""

from __future__ import annotations

from enum import Enum

from twin.models.feeds import ExpertFeed
from twin.models.formats import PLAIN, Role
from twin.models.spec import ModelSpec


class ModelKind(Enum):
    DENSE = "dense"  # in 16 or 32 bits
    FEW_BITS = "few-bits"  # dense, with matrices of 8 or 4 bits
    EXPERTS = "experts"  # whatever they are stored in


def kind_of(spec: ModelSpec) -> ModelKind:
    if any(isinstance(layer.feed, ExpertFeed) for layer in spec.layout):
        return ModelKind.EXPERTS
    return ModelKind.FEW_BITS if stored_as(spec) not in PLAIN else ModelKind.DENSE


def stored_as(spec: ModelSpec) -> str:
    """The formats of its layers' matrices that are no plain ones, else the plain one."""
    if spec.stored is None:
        return spec.dtype.value
    roles = (Role.EXPERT, Role.DENSE, Role.ATTENTION)
    names = [spec.formats.of(role).name for role in roles]
    coded = dict.fromkeys(name for name in names if name not in PLAIN)
    return " ".join(coded) or names[0]
