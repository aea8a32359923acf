"""What the playground makes of a model's text, and what can be done with turns, in a browser."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from tests.server.browser import CHROMIUM, Page, browser
from tests.server.serving import Running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.fixture(scope="module")
def page(live: Running) -> Iterator[Page]:
    with browser() as found:
        found.show(live.url, 1366, 768)
        found.until("state.facts !== null")
        found.run("at('most').value = 20, at('temperature').value = 0")
        yield found


@pytest.fixture(autouse=True)
def clean(page: Page) -> Iterator[None]:
    page.run("store([]), at('system').value = '', begin(fresh())")
    yield
    assert page.faults == []


def html(page: Page, text: str) -> str:
    code = f"const d = element('div', markdown({json.dumps(text)})); d.innerHTML"
    return str(page.run(f"(() => {{ {code.replace('; d.', '; return d.')} }})()"))


CODE = '<div class="code"><div><span>{}</span><button type="button" class="small" title="">Copy'
CODE += '</button></div><pre tabindex="0"><code>{}</code></pre></div>'
LINK = '<a href="{}" rel="noopener noreferrer" target="_blank">{}</a>'
WRITTEN = {
    "a **b** *c* _d_ ~~e~~ `f*g*` snake_case_name 2*3*4\\*": "<p>a <strong>b</strong> <em>c</em> "
    "<em>d</em> <s>e</s> <code>f*g*</code> snake_case_name 2<em>3</em>4*</p>",
    "# One\n## *Two* ##\ntext": "<h3>One</h3><h4><em>Two</em></h4><p>text</p>",
    "- a\n- b\n  1. c\n  2. d\n\n- e": "<ul><li><span>a</span></li><li><span>b</span><ol>"
    "<li><span>c</span></li><li><span>d</span></li></ol></li><li><span>e</span></li></ul>",
    "3) x\n4) y": '<ol start="3"><li><span>x</span></li><li><span>y</span></li></ol>',
    "> a\n> - b\n\n---": "<blockquote><p>a</p><ul><li><span>b</span></li></ul></blockquote><hr>",
    "```py\na *b*\n\n<i>\n```\nc": CODE.format("py", "a *b*\n\n&lt;i&gt;") + "<p>c</p>",
    "~~~~\n```\n~~~~": CODE.format("", "```"),
    "```\nnot ended": CODE.format("", "not ended"),
    "|a|b|\n|-|:-:|\n|1|`2`|": "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>"
    "<tr><td>1</td><td><code>2</code></td></tr></tbody></table>",
    "[t](http://a.b/c_(d)) http://a.b/c.": f"<p>{LINK.format('http://a.b/c_(d)', 't')} "
    f"{LINK.format('http://a.b/c', 'http://a.b/c')}.</p>",
    "![p](http://a.b/p.png)": f"<p>{LINK.format('http://a.b/p.png', 'p')}</p>",
    "<b>bold</b> & <!-- x -->": "<p>&lt;b&gt;bold&lt;/b&gt; &amp; &lt;!-- x --&gt;</p>",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_markdown_becomes_nodes(text: str, page: Page) -> None:
    assert html(page, text) == WRITTEN[text]


@pytest.mark.parametrize(
    "address",
    ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "//a", "x y"],
)
def test_an_address_that_could_run_or_load_something_is_no_link(address: str, page: Page) -> None:
    for text in (f"[t]({address})", f"![t]({address})", f"[t](<{address}>)", f"<{address}>"):
        assert "<a" not in html(page, text)


PIECES = [
    *"<>&\"'`*_~[]()!|#-+>:\\\n\n\n\t  1.aé\0",
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    "<svg/onload=window.owned=1>",
    "<iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "[a](javascript:window.owned=1)",
    '[a](http://x/" onmouseover="window.owned=1)',
    "![a](http://127.0.0.1:1/x.png)",
    "&lt;script&gt;",
    "```html\n",
    "</code></pre>",
    "| a | b |\n|---|---|\n",
    "http://a.b/<img src=x>",
    "**",
    "- ",
    "> ",
    "    ",
]
ELEMENTS = "A BLOCKQUOTE BUTTON CODE DIV EM H3 H4 H5 H6 HR LI OL P PRE S SPAN STRONG TABLE TBODY TD"
ELEMENTS += " TH THEAD TR UL"
ATTRIBUTES = "class href rel start tabindex target title type"
LOOK = """(texts => {
  const found = new Set();
  for (const text of texts) {
    const box = element("div");
    const grown = new Growing(box);
    for (let at = 0; at <= text.length; at += 37) { grown.write(text.slice(0, at)); grown.draw(); }
    grown.write(text); grown.draw();
    document.body.append(box, element("div", markdown(text)));
    for (const one of box.querySelectorAll("*")) {
      found.add(one.nodeName);
      for (const a of one.attributes) found.add(a.name);
      if (one.href && !/^(https?|mailto):/.test(one.href)) found.add(one.href);
    }
    box.nextSibling.remove(); box.remove();
  }
  return [...found];
})"""


def test_nothing_that_a_model_writes_runs_or_loads(page: Page) -> None:
    chance = random.Random(52)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 30))) for _ in range(400)]
    found = set(page.run(f"{LOOK}({json.dumps(texts)})"))
    assert found <= {*ELEMENTS.split(), *ATTRIBUTES.split()}
    assert found >= {"A", "STRONG", "CODE", "LI", "TABLE"}, "the texts are worth something"
    assert page.run("window.owned === undefined")


def test_a_long_line_of_signs_is_shown_in_bounded_time(page: Page) -> None:
    """Each of them searched to the text's end would take minutes."""
    signs = ["*", "_", "`", "[", "**a", "![", "<http://", "> ", "- ", "|", "\\", "~~", "(", "`a"]
    for sign in signs:
        page.run(f"markdown({json.dumps(sign)}.repeat(20000)).childNodes.length")


def test_an_answer_that_grows_looks_like_one_that_is_there(page: Page) -> None:
    for text in WRITTEN:
        whole = f"{text}\n\n{text}\n\nend"
        grown = f"""(() => {{
          const box = element("div"), grown = new Growing(box), text = {json.dumps(whole)};
          const draw = at => {{ grown.write(text.slice(0, at)); grown.draw(); }};
          for (let at = 1; at <= text.length; at++) draw(at);
          const made = [...box.children].slice(0, -1).map(one => one.outerHTML).join("");
          return made + grown.tail.innerHTML;
        }})()"""
        assert page.run(grown) == html(page, whole)


def say(page: Page, text: str) -> None:
    before = page.run("state.history.length")
    page.type(text)
    page.key("Enter")
    page.until(f"state.history.length >= {before + 2} && state.stop === null")


def press(page: Page, turn: int, name: str) -> None:
    buttons = f"[...document.querySelectorAll('.turn')[{turn}].querySelectorAll('.acts button')]"
    page.run(f"{buttons}.find(one => one.textContent === '{name}').click()")


def said(page: Page) -> list[str]:
    return list(page.run("state.history.map(one => one.content)"))


def test_a_turn_is_repeated_or_changed_and_what_followed_is_forgotten(page: Page) -> None:
    say(page, "one")
    say(page, "two")
    first = said(page)
    page.run("at('most').value = 5")
    press(page, 1, "Again")
    page.until("state.history.length === 2 && state.stop === null")
    assert said(page)[0] == "one"
    assert first[1].startswith(said(page)[1])
    page.run("at('most').value = 20")
    press(page, 0, "Edit")
    assert page.run("at('text').value") == "one"
    assert page.run("document.querySelectorAll('.replaced').length") == 2
    page.key("Escape")
    assert page.run("at('text').value + document.querySelectorAll('.replaced').length") == "0"
    press(page, 0, "Edit")
    page.run("at('text').value = ''")
    page.type("changed")
    page.key("Enter")
    page.until("state.history.length === 2 && state.stop === null")
    assert said(page)[0] == "changed"
    assert page.run("document.querySelectorAll('.turn').length") == 2


def test_a_turn_and_a_piece_of_code_can_be_copied_as_they_were_written(page: Page) -> None:
    page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.run("state.history = [{role: 'user', content: 'q'}, {role: 'assistant', content: 'x'}]")
    page.run("state.history[1].content = '**a**\\n```\\nb\\n```'; show()")
    press(page, 1, "Copy")
    page.until("window.copied === '**a**\\n```\\nb\\n```'")
    page.run("document.querySelector('.code button').click()")
    page.until("window.copied === 'b'")


def test_a_system_prompt_is_sent_before_all_turns(page: Page) -> None:
    say(page, "one")
    page.run("at('system').value = 'Be brief.'")
    assert page.run("messages()[0]") == {"role": "system", "content": "Be brief."}
    tokens = "Number(at('prompt').textContent.match(/[\\d,]+/)[0].replace(',', ''))"
    before = page.run(tokens)
    press(page, 1, "Again")
    page.until("state.history.length === 2 && state.stop === null")
    assert page.run(tokens) == before + len("<system>Be brief.\n")


def test_conversations_stay_in_this_browser_until_they_are_forgotten(
    page: Page, live: Running
) -> None:
    page.run("at('system').value = 'S'")
    say(page, "one")
    first = said(page)
    page.run("at('fresh').click()")
    say(page, "two")
    page.show(live.url, 1366, 768)  # loaded again
    page.until("state.facts !== null")
    page.run("at('most').value = 20, at('temperature').value = 0")
    titles = "[...at('past').children].map(one => one.firstChild.textContent)"
    assert page.run(titles) == ["two", "one"]
    page.run("at('past').lastChild.firstChild.click()")
    assert said(page) == first
    assert page.run("at('system').value") == "S"
    assert page.run("document.querySelectorAll('.turn').length") == 2
    say(page, "more")
    assert page.run(titles) == ["one", "two"], "the last one that was used stands first"
    page.run("at('past').firstChild.lastChild.click()")
    assert page.run(titles) == ["two"]
    page.run("localStorage.setItem(PAST, '{broken'), listPast()")
    assert page.run("at('past').children.length") == 0


def test_each_answer_keeps_its_measured_and_its_predicted_rate(page: Page, live: Running) -> None:
    say(page, "one")
    ended = page.run("document.querySelector('.answer').dataset.ended")
    assert ended.startswith("20 tokens, ")
    assert "tokens/s measured" in ended
    page.run("show()")
    assert page.run("document.querySelector('.answer').dataset.ended") == ended
