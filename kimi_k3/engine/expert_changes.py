"""Changes of the experts' placement while a generator serves: begun, switched and given up at the same step on every rank."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.metrics import Metric
from kimi_k3.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
    from kimi_k3.parallel.replication import Transfer

log = logging.getLogger("kimi_k3.experts")


class ExpertChanges:
    """One at a time. Every rank makes the same calls between the same steps.

    counts: changes by result: "completed", "overdue" (its deadline passed) or "failed".     moved: copies this rank received.
    last_completed: {"step", "at" (seconds since 1970), "seconds"} of the last one that completed; empty before.
    last_error: what ended the last one that did not.
    """

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        self._model: Any = model
        self._agreement = Agreement(model)  # of all ranks
        self._group: dist.ProcessGroup | None = None
        self._transfer: Transfer | None = None
        self._plan: ExpertPlacement | None = None
        self._began = self._deadline = 0.0
        self.counts: Counter[str] = Counter(completed=0, overdue=0, failed=0)
        self.moved, self.last_completed, self.last_error = 0, dict[str, float](), ""

    @property
    def is_running(self) -> bool:
        return self._transfer is not None

    def start(self, plan: ExpertPlacement, deadline_s: float) -> None:
        from kimi_k3.parallel.replication import Transfer, check_placement, is_changing

        now: ExpertPlacement | None = getattr(self._model, "expert_placement", None)
        if now is None:
            raise ValueError(
                "replace_experts: want a model whose slots are settled: call use_placement(model, plan) first"
            )
        if is_changing(self._model):
            raise ValueError(
                "replace_experts: a change is under way: step until stats()['expert_changes']['is_running'] is False"
            )
        deadline = repr(float(deadline_s)).encode()
        digest = hashlib.sha256(plan.slots.tobytes() + plan.is_active.tobytes() + deadline).digest()
        mine = int.from_bytes(digest[:7], "little")
        if self._agreement.least([mine, -mine]) != [mine, -mine]:
            raise ValueError(
                "replace_experts: want the same placement on every rank and the same deadline_s, got different ones"
            )
        if not deadline_s > 0:  # after the ranks agreed on it, so that none waits for one that was refused
            raise ValueError(f"replace_experts: want deadline_s > 0, got {deadline_s}")
        check_placement(self._model, plan)
        if plan.capacity != now.capacity:
            raise ValueError(f"replace_experts: want a capacity of {now.capacity}, as in use, got {plan.capacity}")
        if self._group is None:
            self._group = dist.new_group(group_desc="expert transfer")
        self._began = time.monotonic()
        self._deadline = self._began + deadline_s
        self._plan = plan
        self._transfer = Transfer(self._model, now, plan, self._group, self._deadline)
        self._model.expert_transfer = self._transfer

    def at_step_boundary(self, step: int) -> bool:
        """Switch the layers that every rank has staged; end the change when it is complete, late or broken anywhere.

        Returns: whether it ended now.
        """
        transfer = self._transfer
        if transfer is None:
            return False
        assert self._plan is not None
        is_sound_here, is_late = transfer.error is None, time.monotonic() > self._deadline
        mine = [transfer.num_ready, int(is_sound_here), int(not is_late)]
        ready, is_sound, is_timely = self._agreement.least(mine)
        transfer.commit(ready)
        if ready == self._plan.num_layers:
            now = time.monotonic()
            self.last_completed = {"step": step, "at": time.time(), "seconds": now - self._began}
            self._end("completed")
        elif not is_sound or not is_timely:
            self.last_error = (
                f"change of experts given up at step {step}, {ready} of {self._plan.num_layers} layers switched: "
                f"{transfer.error or ('its deadline has passed' if is_late else 'another rank could not go on')}"
            )
            log.warning(self.last_error)
            self._group = None  # its ranks may wait for each other until the deadline; the next change gets its own
            self._end("overdue" if not is_timely else "failed")
        return not self.is_running

    def _end(self, result: str) -> None:
        self.counts[result] += 1
        self.close()

    def close(self) -> None:
        """End what is under way between two steps: layers that have switched stay so, and the model's placement says so."""
        if self._transfer is not None:
            self._transfer.stop()
            self._model.expert_placement = self._transfer.placement()
            self._model.expert_transfer = None
            self.moved += self._transfer.copied
        self._transfer = None

    def stats(self) -> dict[str, Any]:
        return {
            "is_running": self.is_running, **self.counts, "moved": self.moved, "last_completed": self.last_completed,
            "last_error": self.last_error,
        }  # fmt: skip

    def metrics(self) -> list[Metric]:
        last = self.last_completed
        return [
            Metric("expert_changes_total", "counter", "Changes of the experts' placement while serving, ended.",
                   [({"result": result}, float(count)) for result, count in sorted(self.counts.items())]),
            Metric("expert_change_running", "gauge", "Whether one is under way.", [({}, float(self.is_running))]),
            Metric("expert_copies_moved_total", "counter", "Copies that this rank received.", [({}, float(self.moved))]),
            *(Metric(f"expert_change_last_completed_{name}", "gauge", text, [({}, last[key])])
              for name, key, text in (
                  ("timestamp_seconds", "at", "When the last one completed."), ("step", "step", "At which step."),
                  ("duration_seconds", "seconds", "What it took, decoding beside it."),
              ) if last),
        ]  # fmt: skip
