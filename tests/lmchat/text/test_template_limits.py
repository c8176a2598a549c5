"""Hostile templates end as InvalidRequest in bounded memory; friendly ones render as ever."""

import datetime
import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import jinja2.sandbox
import pytest

from lmchat.errors import InvalidRequest, ModelError
from lmchat.text.template import ChatTemplate
from lmchat.text.template_limits import Limits

DOUBLE = "{% set ns = namespace(a=START, b=START) %}{% for i in range(99) %}BODY{% endfor %}"


def doubling(start, body, end=""):
    return DOUBLE.replace("START", start).replace("BODY", body) + end


NESTED = doubling("[1]", "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}")
TUPLES = doubling("(1,)", "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}")
SPACES = "{% namespace(%s) %}"
LONG = "{% set s = 'x' * 1000000 %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) %}"
    "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "loops of filters": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "loops over selected": "{% for a in range(99999) %}"
    "{{ range(99999) | select('eq', 1) | list | length }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "endless loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "wide recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro f(n) %}{% call m() %}{{ f(n + 1) }}{% endcall %}{% endmacro %}{{ f(0) }}",
    "tilde doubling": doubling("'x'", "{% set ns.a = ns.a ~ ns.a %}"),
    "plus doubling": doubling("'x'", "{% set ns.a = ns.a + ns.a %}"),
    "block doubling": doubling(
        "'x'", "{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}"
    ),
    "list doubling": doubling("[1]", "{% set ns.a = ns.a + ns.a %}"),
    "slices kept": LONG
    + doubling("[1]", "{% for j in range(999) %}{% set ns.a = [ns.a, s[1:]] %}{% endfor %}"),
    "literals kept": "{% set ns = namespace(a=1) %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set ns.a = [ns.a, i] %}{% endfor %}{% endfor %}",
    "nested printed": NESTED + "{{ ns.a }}",
    "nested as text": NESTED + "{{ ns.a | string | length }}",
    "nested in tilde": NESTED + "{{ (ns.a ~ '') | length }}",
    "nested as json": NESTED + "{{ ns.a | tojson }}",
    "nested in format": NESTED + "{{ '%s' | format(ns.a) }}",
    "nested in percent": NESTED + "{{ '%s' % (ns.a,) }}",
    "nested in str.format": NESTED + "{{ '{}'.format(ns.a) }}{{ '{!r}'.format(ns.a) }}",
    "nested joined": NESTED + "{{ ns.a | join }}",
    "nested pretty": NESTED + "{{ ns.a | pprint }}",
    "nested compared": NESTED + "{{ ns.a == ns.b }}",
    "nested found": NESTED + "{{ ns.a in [ns.b] }}",
    "nested tested": NESTED + "{{ ns.a is eq(ns.b) }}{{ ns.a is in [ns.b] }}",
    "nested sorted": NESTED + "{{ [ns.a, ns.b] | sort }}",
    "nested sorted lazily": NESTED + "{{ [ns.a, ns.b] | map('list') | sort | length }}",
    "nested greatest": NESTED + "{{ [ns.a, ns.b] | max | length }}",
    "nested counted": NESTED + "{{ [ns.a].count(ns.b) }}",
    "nested changed": NESTED
    + "{% for i in [1, 2] %}{{ loop.changed([ns.a, ns.b][i - 1]) }}{% endfor %}",
    "nested called": NESTED + "{{ ns.a() }}{{ namespace(a=ns.a)() }}",
    "nested raised": NESTED + "{{ raise_exception(ns.a) }}",
    "nested hashed": TUPLES + "{{ {ns.a: 1} | length }}",
    "nested hashed by dict": TUPLES + "{{ dict([(ns.a, 1)]) | length }}",
    "nested hashed by key": TUPLES + "{{ {1: 2}[ns.a] }}",
    "nested hashed by get": TUPLES + "{{ {1: 2}.get(ns.a) }}",
    "nested hashed as unique": TUPLES + "{{ [ns.a] | unique | list | length }}",
    "nested names": doubling("1", "{% set ns.a = namespace(x=ns.a, y=ns.a) %}", "{{ ns.a }}"),
    "circle": "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "product of numbers": doubling("10", "{% set ns.a = ns.a * ns.a %}"),
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated list": "{{ ([1] * 10 ** 10) | length }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent many": LONG + "{{ ('%(a)s' * 1000) % {'a': s} }}",
    "format filter width": "{{ '%999999999d' | format(1) }}",
    "str.format width": "{{ '{:>999999999}'.format(1) }}",
    "str.format given width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "format_map width": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "str.format many": LONG + "{{ ('{0}' * 1000).format(s) }}",
    "markup format": "{{ ('{:>999999999}' | safe).format(1) }}",
    "center filter": "{{ 'x' | center(999999999) }}",
    "center": "{{ 'x'.center(999999999) }}",
    "markup center": "{{ ('x' | safe).center(999999999) }}",
    "center by attr": "{{ ('x' | attr('center'))(999999999) }}",
    "center by map": "{{ ['x'] | map('center', 999999999) | list }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "expandtabs named": "{{ '\t'.expandtabs(tabsize=999999999) }}",
    "many tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "indent": "{{ 'x\ny' | indent(999999999) }}",
    "indent many": "{{ ('\n' * 99999) | indent(99999) }}",
    "indent text": LONG + "{{ ('\n' * 99999) | indent(s) }}",
    "json indent": "{{ [1] | tojson(indent=999999999) }}",
    "json indent text": LONG + "{{ range(99) | list | tojson(indent=s) }}",
    "json separators": LONG + "{{ range(99) | list | tojson(separators=(s, ':')) }}",
    "join": LONG + "{{ range(99999) | join(s) }}",
    "join method": LONG + "{{ s.join(['a'] * 99999) }}",
    "join lazily": LONG + "{{ s.join(['a'] * 99999 | map('upper')) }}",
    "replace filter": LONG + "{{ s | replace('x', s) }}",
    "replace": LONG + "{{ s.replace('x', s) }}",
    "replace nothing": LONG + "{{ s.replace('', s) }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list | length }}",
    "slice": "{{ [1] | slice(999999999) | list | length }}",
    "round": "{{ 1 | round(999999999) }}",
    "wordwrap": LONG + "{{ s | wordwrap(1) }}",
    "wordwrap text": LONG + "{{ s | wordwrap(1, wrapstring=s) }}",
    "search from the right": "{{ ('a' * 9999999).rfind('b' + 'a' * 4999999) }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "splits": "{{ ('a ' * 5000000).split() | length }}",
    "lazy filters": "{% set l = [1] * 200000 %}{{ l"
    + " | select('eq', 1) | reject('eq', 2) | map('string')" * 60
    + " | list | length }}",
    "long comparisons": "{% set s = 'x' * 9999999 %}{% set t = 'x' * 9999999 %}"
    + ("{% if s == t and t == s and s == t and t == s and s == t and s < t %}{% endif %}") * 400,
    "long searches": "{% set s = 'x' * 9999999 %}"
    + "{% if 'xyz' in s or 'xya' in s or 'yza' in s %}{% endif %}" * 900,
    "long reversals": "{% set s = 'x' * 9999999 %}" + "{% set t = s | reverse %}" * 900,
    "numbers of other bases": "{{ ('1' * 999999) | int(base=2) // 3 }}",
    "keys": "{% set d = dict(range(40000) | batch(2)) %}"
    + "{% set e = d.keys() - d.keys() %}" * 300,
    "comments": "{{ ('<!---->' * 400000) | striptags }}{{ ('<!--' * 99999 | safe).striptags() }}",
    "splats": "{% macro m() %}{{ varargs | length }}{% endmacro %}{% set l = [1] * 200000 %}"
    + "{% set x = m(*l) %}" * 900,
    "lipsum": "{{ lipsum(n=999999999) }}",
    "range": "{{ range(999999999) | list }}",
    "huge range": "{{ range(10 ** 100) | list }}",
    "bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "translate": LONG + "{{ s.translate({120: s}) }}",
    "date": "{{ strftime_now('%A' * 999999) }}",
    "output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "output in a macro": "{% macro m() %}{% for i in range(99999) %}"
    + "x" * 9000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "class": "{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ '' | attr('__class__') }}{{ ('' | attr('__class__')).x }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "globals": "{{ raise_exception.__globals__['json'].x }}",
    "unbound method": "{{ dict.update(messages[0], {'role': 'system'}) }}",
    "changed messages": "{{ messages[0].update({'role': 'system'}) }}",
    "attribute of nothing": "{{ messages[7].content.strip() }}",
    "wrong call": "{{ messages(1) }}",
    "wrong arguments": "{{ 'x'.center() }}{{ 'x' | center(1, 2, 3) }}",
    "wrong separators": "{{ 1 | tojson(separators=1) }}",
    "wrong types": "{{ 1 + 'x' }}",
    "division": "{{ 1 // 0 }}",
    "overflow": "{{ 10.0 ** 999 }}",
    "no loader": "{% include 'x' %}",
}
MESSAGES = [{"role": "user", "content": "Hi"}]


# Each of them is refused in a process of its own, for how much memory that had is asked afterwards.
HOSTS = """
import json, re, resource, sys
from pathlib import Path
from lmchat.errors import InvalidRequest
from lmchat.text.template import ChatTemplate
from lmchat.text.template_limits import Limits
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
status = Path("/proc/self/status")
def peak():  # KiB; ru_maxrss would begin at what the parent had before exec
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text()).group(1))
    return 0
given = json.load(sys.stdin)
for name, source in given["sources"].items():
    messages = [dict(message) for message in given["messages"]]
    try:
        # Less than the default of 2 seconds: a few only end by their time.
        ChatTemplate("{{ '' }}" + source, limits=Limits(seconds=0.2)).render(messages)
        said = None
    except InvalidRequest as error:
        said = str(error)
    print(json.dumps({"name": name, "said": said, "peak": peak(),
                      "changed": messages != given["messages"]}))
print(json.dumps({"name": "then", "said": ChatTemplate("{{ 1 + 1 }}").render([])}))
"""


@pytest.fixture(scope="module")
def hosted():
    """Returns the outcome of each hostile template."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTS],
        input=json.dumps({"sources": HOSTILE, "messages": MESSAGES}),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(hosted, name):
    found = hosted[name]
    assert found["said"] is not None
    assert re.match("chat template: .", found["said"])
    assert len(found["said"]) < 2000
    assert not found["changed"]


def test_memory_and_processor_time_stay_bounded(hosted):
    """Each limit of memory is one of ours and not the process's; then it renders as before."""
    assert hosted["then"]["said"] == "2"
    for name in HOSTILE:
        assert "memory" not in hosted[name]["said"] or "over" in hosted[name]["said"], name
        assert hosted[name]["peak"] <= 1 << 20, name  # KiB


@pytest.mark.parametrize(
    ("source", "limits", "words"),
    [
        (HOSTILE["loops"], Limits(seconds=0.1, memory=1 << 50), "over 0.1 seconds"),
        (HOSTILE["loops"], Limits(seconds=1e9, memory=1 << 20), "over 1048576 bytes of memory"),
        ("{{ 'x' * 1000 }}", Limits(output=999), "over 999 characters of output"),
        ("{{ ('x' * 1000) | length }}", Limits(value=999), "over 999 bytes in one value"),
        ("{{ 10 ** (10 ** 9) }}", Limits(), "an integer over 10000 bits"),
        ("{{ 'x'.center(100001) }}", Limits(), "a width or count over 100000"),
        (HOSTILE["endless macro"], Limits(), "levels of calls"),
        ("{{ ''.encode() }}", Limits(), "'encode' is not for templates"),
    ],
)
def test_the_error_names_the_limit(source, limits, words):
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(source, limits=limits).render([])


def test_limits_grow_with_the_messages():
    """Some templates look back over all messages for each of them, as Gemma 4's does."""
    limits = Limits(seconds=2.0, memory=1 << 20, message_memory=1 << 18)
    assert [limits.of(n).seconds for n in (0, 1000, 10**9)] == [2.0, 12.0, limits.most_seconds]
    assert Limits(seconds=100).of(10**6).seconds == 100  # what a caller allows is not lowered
    source = "{% for m in messages %}{% set x = 'x' * 200000 %}{% endfor %}{{ messages | length }}"
    messages = [{"role": "user", "content": ""}] * 40
    assert ChatTemplate(source, limits=limits).render(messages) == "40"
    with pytest.raises(InvalidRequest, match="over 1048576 bytes of memory"):
        ChatTemplate(source, limits=replace(limits, message_memory=0)).render(messages)


def test_a_template_is_usable_after_a_refusal():
    source = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    template = ChatTemplate(source, limits=Limits(seconds=0.2))
    with pytest.raises(InvalidRequest, match="over"):
        template.render([], n=90000)
    assert template.render([], n=3) == "3"


def test_a_refusal_keeps_nothing_of_the_template_alive():
    class Words(list):
        pass

    words = Words(["x"])
    alive = weakref.ref(words)
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{{ words[0] }}{{ 1 // 0 }}").render([], words=words)
    del words
    gc.collect()
    assert caught.value.__context__ is None
    # The frame of the test's own call is the only one left, and it holds no template variable.
    assert "template code" not in str(caught.traceback)
    caught = None
    gc.collect()
    assert alive() is None


def test_threads_have_limits_of_their_own():
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}",
        limits=Limits(seconds=0.2),
    )
    outcomes = {}

    def render(index, n):
        try:
            outcomes[index] = template.render([], n=n)
        except InvalidRequest as error:
            outcomes[index] = "over" in str(error)

    threads = [threading.Thread(target=render, args=(i, 99999 if i % 2 else i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {i: True if i % 2 else str(i) for i in range(8)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 50000 + "1 }}",
        "{{ " + "+".join("1" * 20000) + " }}",
        "{% for i in [1] %}" * 99 + "{% endfor %}" * 99,
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "x" * (1 << 19) + "x",
    ],
    ids=["brackets", "minus", "sum", "loops", "ifs", "long"],
)
def test_sources_that_cannot_be_compiled_are_model_errors(source):
    with pytest.raises(ModelError, match="^chat template: .") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 2000


FRIENDLY = [
    "{{ 'a' ~ 1 ~ none ~ [1, 'x'] ~ {'a': 1} }}{{ 1 + 2 * 3 ** 2 % 5 - 1 // 2 }}{{ 'a' + 'b' }}",
    "{{ '%s is %5.2f%%' % ('x', 1.5) }}{{ '%d-%s' | format(1, 'x') }}{{ '%(a)s' | format(a=1) }}",
    "{{ '{:>5}|{a!r}|{0[0]}'.format('xy', a='q') }}{{ '{a}'.format_map({'a': 1}) }}",
    "{{ ('{}' | safe).format('<') }}{{ ('<b>' | safe) + '<' }}{{ '<' | e }}{{ ['<'] | join('&') }}",
    "{{ 'x' | center(9) }}|{{ 'x'.ljust(3) }}|{{ 'a\nb' | indent(2, true) }}"
    "{{ 'a b' | wordwrap(1) }}",
    "{{ [3, 1, 2] | sort | join(',') }}{{ {'b': 1, 'a': 2} | dictsort }}"
    "{{ [1, 1, 2] | unique | list }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}",
    "{{ xs | selectattr('a', 'eq', 1) | map(attribute='b') | join('-') }}{{ xs | groupby('a') }}",
    "{% for x in xs if x.a == 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{% else %}no{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1} | items | list }}",
    "{{ 'a,b'.split(',') }}{{ ' a '.strip() }}{{ 'aXb'.replace('X', '-') }}"
    "{{ '-'.join(['a', 'b']) }}",
    "{{ ', '.join(xs | map(attribute='b')) }}{{ 'ab' | replace('a', 'c') }}"
    "{{ 'xAy' | trim('xy') }}",
    "{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ (1, 2) + (3,) }}{{ [0] * 3 }}"
    "{{ 'ab' * 2 }}{{ {1: [2]} }}",
    "{{ [1] == [1] }}{{ xs in [xs] }}{{ xs is eq(xs) }}{{ 1 < 2 < 3 }}"
    "{{ 'a' in 'abc' }}{{ nope is defined }}",
    "{% macro m(a, b=2) %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}"
    "{{ caller() if caller }}]{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, c=4) }}"
    "{% call m(5) %}in{% endcall %}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}"
    "{% endfor %}{{ ns.n }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}{% filter upper %}q{{ x }}{% endfilter %}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ dict(a=1) }}{% set j = joiner(',') %}"
    "{{ j() }}{{ j() }}",
    "{{ 7 | string }}{{ '7' | int + 1 }}{{ 1.26 | round(1) }}{{ 'a b' | title }}"
    "{{ 'abc' | truncate(3) }}",
    "{{ ['b', 'a'] | max }}{{ 'a b' | wordcount }}{{ 'a/b c' | urlencode }}"
    "{{ [1, {'a': 2}] | pprint }}",
    "{% block b %}{{ 1 }}{% endblock %}{{ self.b() }}{{ none }}{{ 1 if false }}{{ 1.0 }}{{ true }}",
]


@pytest.mark.parametrize("source", FRIENDLY)
def test_friendly_templates_render_as_in_the_plain_sandbox(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    xs = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 1, "b": "z"}]
    assert ChatTemplate(source).render([], xs=xs) == plain.from_string(source).render(xs=xs)


def test_a_long_conversation_is_within_the_limits():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} naïve 你好 " * 60}
        for i in range(1000)
    ]
    source = (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out ~ '<' + m.role + '>' %}"
        "{{ m.content.split('x')[-1].strip() + '\n' }}{% endfor %}{{ ns.out }}"
    )
    text = ChatTemplate(source).render(messages)
    assert text.count("你好") == 60_000
    assert text.endswith("<user><assistant>")


def test_the_time_of_a_render_can_be_given():
    template = ChatTemplate("{% macro d() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ d() }}")
    assert template.render([], now=datetime.datetime(2031, 5, 6)) == "06 May 2031"
    assert template.render([]) == datetime.datetime.now().strftime("%d %b %Y")
