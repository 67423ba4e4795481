"""Rows of supervised runs in given shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.data.row_set import RowSource
from megarl.data.supervised import demonstrations_of, load_supervised, rows_by_set
from megarl.recipe.supervised import PairData, SftData
from tests.support.tiny import write_tiny_model

NAMES = ("math", "math", "code", "math", "chat", "code")
MIX = {"math": 3.0, "code": 1.0, "chat": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def loaded(folder: Path, model: Path, kind: type[Any], *names: object, **keys: Any) -> tuple[Any, Any]:
    texts = {"response": "2"} if kind is SftData else {"chosen": "2", "rejected": "3"}
    rows = [{"prompt": f"{at}+1", **texts, "source": name} for at, name in enumerate(names)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = kind(train=path, mix_key="source", **{"mix": MIX, **keys})
    return load_supervised(path, model, data), data


@pytest.mark.parametrize("kind", [SftData, PairData])
def test_each_set_has_its_share_and_one_without_is_left_out(tmp_path: Path, model: Path, kind: type[Any]) -> None:
    """5 rows are an epoch, of which 4 are math's: 3.75 of 5, rounded."""
    rows, data = loaded(tmp_path, model, kind, *NAMES)
    sets = rows_by_set(rows, data)
    assert {name: places.tolist() for name, places in sets.items()} == {"math": [0, 1, 3], "code": [2, 5]}
    source: RowSource[Any] = RowSource(rows, 1, sets=sets, mix=data.mix)
    taken = [int(demonstrations_of(row)[0].id.rpartition(":")[2]) - 1 for row in source.take(30)]
    assert Counter(NAMES[at] for at in taken) == {"math": 24, "code": 6}
    assert Counter(taken) == {0: 8, 1: 8, 3: 8, 2: 3, 5: 3} and source.epoch == 6.0
    resumed: RowSource[Any] = RowSource(rows, 1, sets=sets, mix={**data.mix, "math": 1.0})
    with pytest.raises(UserError, match="mix was"):
        resumed.load_state(source.state())


@pytest.mark.parametrize("kind", [SftData, PairData])
def test_a_row_of_no_set_of_the_mix_is_refused_and_without_a_mix_none_is(
    tmp_path: Path, model: Path, kind: type[Any]
) -> None:
    rows, data = loaded(tmp_path, model, kind, "math", "cod", "code")
    with pytest.raises(UserError, match=r"rows.jsonl:2: its field 'source', .* is 'cod'.*Did you mean 'code'\?"):
        rows_by_set(rows, data)
    rows, data = loaded(tmp_path, model, kind, "math", None, mix={})
    assert rows_by_set(rows, data) == {}
    assert len(RowSource(rows, 1, sets={}, mix={}).take(2)) == 2
