"""Chat templates are code from strangers: they render within limits, or not at all."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.refusals import refused
from tests.server.serving import TEMPLATE
from twin.errors import ConfigError
from twin.server.problem import Problem
from twin.server.template import Template

HI = [{"role": "user", "content": "hi"}]


@contextmanager
def opened(source: str, seconds: float = 2.0) -> Iterator[Template]:
    template = Template(source, {"bos_token": "<s>"}, seconds=seconds)
    try:
        yield template
    finally:
        template.close()


def test_a_template_renders_messages_and_special_tokens() -> None:
    with opened("{{ bos_token }}" + TEMPLATE) as template:
        assert template.render(HI) == "<s><user>hi\n<assistant>"
        assert template.render(HI, generate=False) == "<s><user>hi\n"


def test_what_published_templates_use_is_there() -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if loop.first %}{% continue %}{% endif %}\n"
        "    {{- m | tojson }}{{ strftime_now('%Y') | length }}\n"
        "{%- endfor %}"
    )
    with opened(source) as template:
        said = template.render([*HI, {"role": "user", "content": "é"}])
        assert said == '{"role": "user", "content": "é"}4'


# Each where published templates use it; what it renders is checked against transformers.
USED = {
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n"
    "{% endfor %}",
    "no tools": "{% if tools is not none or documents is not none %}tools{% endif %}{{ tools }}",
    "tojson": "{{ messages | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    "{{ messages | tojson(ensure_ascii=False, indent=4) }}{{ '<' | tojson(false, 2) }}",
    "namespace": "{% set ns = namespace(n=1, self=2) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "dict": "{{ dict(a=1, b=[2]) | tojson }}{% set d = dict([('x', 3)]) %}{{ d.x }}",
    "white space": "{% if true %}\n  {{- 'a' }}\n  {% endif %}\n  {%+ if true %}b{% endif %}\n",
}


@pytest.mark.parametrize("used", USED)
def test_what_published_templates_use_renders_as_in_transformers(used: str) -> None:
    says = {
        "generation": "hiè",
        "no tools": "None",
        "tojson": r'[{"content":"hi","role":"user"},{"content":"\u00e8","role":"user"}]'
        '[\n    {\n        "role": "user",\n        "content": "hi"\n    },'
        '\n    {\n        "role": "user",\n        "content": "è"\n    }\n]"<"',
        "namespace": "32",
        "dict": '{"a": 1, "b": [2]}3',
        "white space": "a\n  b",
    }
    with opened(USED[used]) as template:
        assert template.render([*HI, {"role": "user", "content": "è"}]) == says[used]


@pytest.mark.hf
@pytest.mark.parametrize("used", USED)
def test_transformers_renders_it_so(used: str) -> None:
    hf = pytest.importorskip("transformers.utils.chat_template_utils")
    said = [*HI, {"role": "user", "content": "è"}]
    with opened(USED[used]) as template:
        ours = template.render(said)
    (theirs,), _ = hf.render_jinja_template([said], None, None, USED[used])
    assert ours == theirs


def test_what_a_template_refuses_is_the_requests_mistake() -> None:
    with opened("{{ raise_exception('roles must alternate') }}") as template:
        refused(Problem, lambda: template.render(HI), "roles must alternate")


@pytest.mark.parametrize(
    "source",
    [
        "{% set names = namespace() %}{% set names.__html__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ namespace({'_x': 1}) }}",
    ],
)
def test_a_template_sets_no_name_that_python_looks_for(source: str) -> None:
    with opened(source) as template:
        refused(Problem, lambda: template.render(HI), "begins with an underscore")


HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "exploding": "{% set x = ['x' * 1000000] %}{% for a in range(99999) %}{{ x[0] }}{% endfor %}",
    "much memory": "{{ ('x' * 2000000000) | length }}",
    "class": "{{ dict.__init__.__globals__ }}{{ dict.mro() }}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "changing": "{{ messages.append(1) }}",
    "a wide range": "{{ range(10**9) | list | length }}",
    "import": "{% import 'os' as os %}",
    "number": "{{ (8 + messages | length) ** (9 ** 9) }}",
}


SOON = ("endless", "much memory", "python")  # the others fail in the same ways


@pytest.mark.parametrize(
    "case",
    [case if case in SOON else pytest.param(case, marks=pytest.mark.slow) for case in HOSTILE],
)
def test_a_hostile_template_is_stopped_and_the_next_request_asks_again(case: str) -> None:
    with opened(HOSTILE[case], seconds=0.3) as template:
        for _ in range(2):
            try:
                said = template.render(HI)
            except Problem:
                continue
            assert not {"class", "module"} & {*said.split()}, said


def test_a_text_that_is_no_template_is_refused_at_the_start() -> None:
    refused(ConfigError, lambda: Template("{% for %}", {}), "chat template")


@pytest.mark.parametrize(
    ("source", "mark"),
    [
        ("{% for m in messages %}{{ m.content }}<|x_end|>\n{% endfor %}", "<|x_end|>"),
        ("{% for m in messages %}<|x|>{{ m.content }} <|x_end|><|x|>{% endfor %}", "<|x_end|>"),
        ("{% for m in messages %}<|x|>{{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}<|x|>{{ m.content | upper }}<|x_end|>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (TEMPLATE, None),
    ],
)
def test_what_a_template_writes_behind_an_answer_ends_one(source: str, mark: str | None) -> None:
    with opened(source) as template:
        assert template.end_mark(["<|x|>", "<|x_end|>", "<|x"]) == mark


def test_libraries_may_lie_where_only_the_server_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONPATH; here the child's Python has no site-packages at all."""
    start = subprocess.Popen

    def without_site(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([command[0], "-S", *command[1:]], **options)

    monkeypatch.setattr(subprocess, "Popen", without_site)
    with opened(TEMPLATE) as template:
        assert template.render(HI) == "<user>hi\n<assistant>"
