import pytest
import torch
from checks import filled_cache
from models import VOCAB, dense, hybrid, random_ids, random_tree

from ddtree_lab.records import format_bytes
from ddtree_lab.stages.cache import describe_cache
from ddtree_lab.stages.draft import Draft
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.forward import run_target
from ddtree_lab.stages.mask import build_mask
from ddtree_lab.stages.tree import build_tree
from ddtree_lab.stages.verify import verify_tree
from ddtree_lab.stages.walk import walk_tree


def every_record():
    """One record of each stage, by name."""
    target, logits = hybrid(), torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    cache, tree = filled_cache(target, random_ids(6)), build_tree(logits, 9, root_token_id=3)
    verification = verify_tree(target, cache, tree)
    return {
        "cache": describe_cache(cache),
        "empty cache": describe_cache(dense(window=5)),
        "embedding": resolve_embeddings(target),
        "forward": run_target(target, random_ids(2), None, [0]),
        "draft": Draft(logits, 3, 5),
        "tree": tree,
        "mask": build_mask(tree, 6, windows=[4]),
        "verification": verification,
        "flattened": verify_tree(target, cache, tree, "flattened"),
        "walk": walk_tree(tree, verification.argmax_token_ids),
    }


RECORDS = every_record()
each_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


@each_record
def test_print_shows_what_to_text_gives(record, capsys):
    print(record)
    assert capsys.readouterr().out.rstrip("\n") == record.to_text() == str(record)


@each_record
def test_repr_is_one_short_line(record):
    assert "\n" not in repr(record)
    assert len(repr(record)) < 150
    assert repr(record).startswith(type(record).__name__)


@each_record
def test_a_notebook_gets_the_same_text_as_html(record):
    bundle = record._repr_mimebundle_()
    assert bundle["text/plain"] == record.to_text()
    assert bundle["text/html"].startswith("<pre")
    assert "<script" not in bundle["text/html"]


@each_record
@pytest.mark.parametrize("width", [60, 100])
def test_text_keeps_to_its_width_and_has_no_colour_codes(record, width):
    text = record.to_text(width=width)
    assert text.strip()
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text


@each_record
def test_ascii_text_is_ascii_without_losing_what_it_says(record):
    text = record.to_text(ascii=True)
    assert text.isascii()
    assert not set("─│┌┐└┘├┤┬┴┼━┃╭╮╰╯") & set(text)
    assert "?" not in text  # a character with no ASCII form says nothing


def test_text_shows_the_tree_the_path_and_the_layers():
    tree, walk, cache = (RECORDS[name].to_text() for name in ("tree", "walk", "cache"))
    assert all(f"node {i}," in tree for i in range(1, 10))
    assert "bonus" in walk
    assert cache.count("linear_attention") == 3 and cache.count("full_attention") == 1


def test_mask_text_marks_ancestors_and_self():
    tree = random_tree("chain", 3)
    rows = [line for line in build_mask(tree, 4).to_text().splitlines() if "all" in line]
    assert [sum(line.count(mark) for mark in "●○") for line in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1.02e+03 B"),
        (1024, "1 KiB"),
        (150994944, "144 MiB"),
        (2**41, "2 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
