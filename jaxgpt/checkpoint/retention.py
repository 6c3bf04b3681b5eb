"""Retention of checkpoints: select the checkpoints that a run keeps (`train.keep_*`), and delete the others."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from jaxgpt.checkpoint.index import PARTIAL, checkpoints, ranked_on
from jaxgpt.checkpoint.info import Info
from jaxgpt.config import TrainConfig


def steps_to_keep(infos: Mapping[int, Info], train: TrainConfig) -> set[int]:
    """Return the steps to keep: the newest step, even if temporary, and steps selected by `train.keep_*`.

    The best checkpoints are selected separately for each validation data and first evaluator.
    """
    lasting = sorted(step for step, info in infos.items() if not info.temporary)

    rankings: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for step in lasting:
        info = infos[step]
        if info.ranking is not None:
            rankings[ranked_on(infos, step)].append((info.ranking, step))
    best = []
    for ranked in rankings.values():
        best += [step for _, step in sorted(ranked)[: train.keep_best]]
    every = [step for step in lasting if train.keep_every and step % train.keep_every == 0]
    return {max(infos), *lasting[-train.keep_last :], *best, *every}


def prune(directory: Path, train: TrainConfig) -> str:
    """Delete the checkpoints that `steps_to_keep` omits, except checkpoints with a damaged checkpoint.json.

    Returns:
        A note with the first checkpoint that cannot be deleted, or "".
    """
    infos = checkpoints(directory)
    note = ""
    for step in sorted(infos.keys() - steps_to_keep(infos, train)):
        path = directory / str(step)
        unwanted = path.with_suffix(PARTIAL)
        try:
            path.rename(unwanted)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError as e:
            note = note or f"cannot delete the old checkpoint {path}: {e.strerror}"
            continue
        shutil.rmtree(unwanted, ignore_errors=True)
    return note
