"""When the actions of a step ran, on the clock of the device.

A CPU has done an action when its call returns, so the clock of the host is right at once. An
accelerator works through a queue: there each action is enclosed by two events of the device, which
are read when the step is over there. Nothing waits for them inside a step; whoever needs them every
step (metrics, `"adapt"`) looks one step late.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from whale.devices import LocalDevice, Moment
from whale.runtime.executor import StepOutcome
from whale.runtime.result import Timing
from whale.runtime.step_update import Update
from whale.scheduling import Action, Kind


@dataclass(frozen=True)
class StepMoments:
    """Moments of one step on this rank."""

    start: Moment
    waiting: Moment
    """all actions are done, gradients of other ranks are waited for"""
    waited: Moment
    updating: Moment
    end: Moment


class DeviceClock:
    """Brings moments of a device onto the clock of this process."""

    def __init__(self, device: LocalDevice) -> None:
        self._device = device
        self._moment = device.event()
        device.wait_for(self._moment)
        self._seconds = time.perf_counter()

    def move_to(self, moment: Moment) -> None:
        """Counts from this moment on: the difference of two events that lie hours apart is not
        exact.
        """
        self._seconds = self.seconds(moment)
        self._moment = moment

    def seconds(self, moment: Moment) -> float:
        return self._seconds + self._device.elapsed_s(self._moment, moment)


class StepTiming:
    """Where the time of one step went. `read` waits until the step is over on the device."""

    def __init__(
        self, clock: DeviceClock, outcome: StepOutcome, moments: StepMoments, device: LocalDevice
    ) -> None:
        self._clock = clock
        self._outcome = outcome
        self._moments = moments
        self._device = device
        self._timing: Timing | None = None

    def read(self) -> Timing:
        """The timing; from here on the events of the outcome are those of the device."""
        if self._timing is None:
            self._timing = self._read()
        return self._timing

    def _read(self) -> Timing:
        moments = self._moments
        outcome = self._outcome
        self._device.wait_for(moments.end)
        self._clock.move_to(moments.start)
        seconds = self._clock.seconds
        for action, start, end in outcome.moments:
            outcome.events.append((action, seconds(start), seconds(end)))
        outcome.moments.clear()
        update = (seconds(moments.updating), seconds(moments.end))
        bubble_s = 0.0
        for action, start_s, end_s in outcome.events:
            if action.kind is Kind.RECEIVE:  # the stream waits for the message and does nothing
                bubble_s += end_s - start_s
        compute_s = outcome.compute_s + update[1] - update[0]
        outcome.events.append((Action(Kind.UPDATE), *update))
        return Timing(
            self._device.elapsed_s(moments.start, moments.end),
            compute_s,
            self._device.elapsed_s(moments.waiting, moments.waited),
            bubble_s,
        )


def timing_on_host(
    outcome: StepOutcome, moments: StepMoments, update: Update, bubble_s: float
) -> Timing:
    """Where the time of one step went on a CPU, whose moments are seconds of the host."""
    return Timing(
        moments.end - moments.start,
        outcome.compute_s + update.seconds,
        moments.waited - moments.waiting + update.waited_s,
        bubble_s,
    )
