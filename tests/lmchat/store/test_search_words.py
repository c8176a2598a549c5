"""Searching texts without spaces between their words, in the index and without one."""

import random

import pytest
import stores
from old_stores import write_version_2
from stores import home_in_memory, opened_store, talk  # noqa: F401 - fixtures

from lmchat.store.memory_store import MemoryStore
from lmchat.store.sqlite import schema
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.words import joined, marks, separated, words

TEXTS = {
    "learning": "我在学习机器学习和深度学习。",
    "kyoto": "京都へ行きたいです。ラーメンを食べる、「寿司」も。",
    "school": "저는 학교에서 친구를 만났어요. 고등학교는 멀어요",
    "mixed": "用PyTorch训练GPT-4模型，学习率3e-4，在2024年😀完成了",
    "thai": "ภาษาไทยไม่มีช่องว่าง",
    "eats": "ฉันกินข้าวทุกวัน",
    "shares": "ฉันกันข้าวไว้",
    "plain": "A machine learns; café, naïve 😀 emoji",
}
FOUND = [
    ("机器学习", ["learning"]),
    ("学习", ["learning", "mixed"]),
    ("习机", ["learning"]),  # within no word, but in this order
    ("器机", []),
    ("深度 机器", ["learning"]),
    ("深度 模型", []),
    ("行きたい", ["kyoto"]),
    ("ラーメン", ["kyoto"]),
    ("メン", ["kyoto"]),
    ("ラーメソ", []),
    ("寿司", ["kyoto"]),
    ("「寿司」", ["kyoto"]),
    ("학교", ["school"]),
    ("학교*", ["school"]),
    ("친구", ["school"]),
    ("교학", []),
    ("GPT", ["mixed"]),
    ("gpt-4模型", ["mixed"]),
    ("pytorch训练", ["mixed"]),
    ("torch训练", []),
    ("2024", ["mixed"]),
    ("2024年", ["mixed"]),
    ("20*", ["mixed"]),
    ("年😀完成", ["mixed"]),
    ("😀", []),
    ("ไทย", ["thai"]),
    ("กิน", ["eats"]),  # not กัน, which differs in a sign alone
    ("กันข้าว*", ["shares"]),
    ("กน", []),
    ("ฉัน กิน", ["eats"]),
    ("cafe", ["plain"]),
    ("mach*", ["plain"]),
    ("mach", []),
    ('"机器" OR 学习', []),
    ('机器"学习"', ["learning"]),
    ("'机器' ;--", ["learning"]),
    ("机器学习*", ["learning"]),
    ("机* 深度", ["learning"]),
]


@pytest.fixture(params=["disk", "memory"])
def filled(request, store):
    """A store of each kind with a session of each text."""
    chosen = store if request.param == "disk" else MemoryStore()
    for name, text in TEXTS.items():
        chosen.add(talk(name, 1, text, own_title="-"))
    return chosen


@pytest.mark.parametrize(("search", "expected"), FOUND)
def test_a_search_finds_words_without_spaces(filled, search, expected):
    assert sorted(one.name for one in filled.summaries(search=search)) == sorted(expected)


def test_texts_without_spaces_are_found_by_any_part_of_them(store):
    """A search finds what a scan of the texts finds."""
    rng = random.Random(5)
    scripts = ("机器学习𠀀かなカー한국어ไทย 。", "กขทยไาิี่ ")
    texts = {f"s{i}": "".join(rng.choices(scripts[i % 2], k=40)) for i in range(30)}
    for name, text in texts.items():
        store.add(talk(name, 1, text, own_title="-"))
    for _ in range(150):
        text = texts[f"s{rng.randrange(30)}"]
        at = rng.randrange(30)
        search = text[at : at + rng.randint(1, 6)].strip(" 。").split(" ")[0].split("。")[0]
        if any(character.isalnum() for character in search):  # not signs of vowels alone
            plain = {name: joined_letters(text) for name, text in texts.items()}
            expected = {name for name, text in plain.items() if search in text}
            assert {one.name for one in store.summaries(search=search)} == expected, search


def joined_letters(text):
    return "".join(character for character in text if character not in " 。")


def test_titles_and_names_too(store):
    record = talk("旅行計画", 1, "hello", own_title="京都の旅")
    record = store.add(record)
    store.add(talk("กัน", 1, "hello", own_title="-"))
    assert store.summaries(search="กิน") == []
    assert [one.name for one in store.summaries(search="กัน")] == ["กัน"]
    for search in ("計画", "京都", "の旅"):
        assert [one.name for one in store.summaries(search=search)] == ["旅行計画"]
    record = store.rename(record, "会議")
    assert store.summaries(search="計画") == []
    assert [one.snippet for one in store.summaries(search="会議")] == ["会議"]
    record = store.change(record.changed(own_title="東京"))
    assert store.summaries(search="京都") == []
    assert [one.title for one in store.summaries(search="東京")] == ["東京"]
    assert store.verify() == []


def test_what_is_shown_is_the_true_text(store):
    long = "前置き" * 100 + "これは GPT の話、機械学習。" + "終わり" * 100
    store.add(talk("a", 1, long, own_title="-"))
    (found,) = store.summaries(search="機械学習")
    assert found.snippet.strip("…") in long
    assert "これは GPT の話、機械学習。" in found.snippet
    assert found.snippet.startswith("…")
    assert len(found.snippet) < 80
    assert [found.snippet[a:b] for a, b in marks(found.snippet, "機械学習")] == ["機械学習"]


def test_a_text_that_changes_and_goes(store):
    record = talk("a", 1, "機械")
    record = store.add(record)
    record = store.change(*stores.grow(record, "学習"))
    assert len(store.summaries(search="学習")) == 1
    assert store.verify() == []
    store.remove(record)
    assert store.summaries(search="学習") == store.summaries(search="機械") == []
    assert store.verify() == []


def test_separators_are_all_that_is_added():
    for text in TEXTS.values():
        made = separated(text)
        assert joined(made or text) == text
        assert (made is None) == text.isascii() or text.startswith("A ")
    assert separated("naïve café, größer; привет мир 😀") is None
    assert [word.folded for word in words("機械A1のCafé")] == ["機", "械", "a1", "の", "cafe"]


def test_found_words_are_marked():
    text = "用GPT-4模型。Zoë's golden goldfish"
    for search, found in [
        ("gpt-4模", ["GPT-4模"]),
        ("模型 zoe", ["模型", "Zoë"]),
        ("gold*", ["golden", "goldfish"]),
        ("gold nothing", []),
        ("*", []),
    ]:
        assert [text[start:end] for start, end in marks(text, search)] == found


def test_an_older_store_is_indexed_again(data_dir, monkeypatch):
    """In pieces, so that not all of its texts are in memory."""
    monkeypatch.setattr(schema, "_AT_A_TIME", 3)
    added = [(n, 2, 5, (n,), f"第{n}回の会議 nr{n}") for n in range(3, 30)]
    write_version_2(data_dir, added)
    store = SqliteStore(data_dir)
    for search in ("会議", "29回", "nr29"):
        assert [one.name for one in store.summaries(search=search)] == ["old"], search
    assert store.summaries(search="30回") == []
    assert store.verify() == []
    store.close()
