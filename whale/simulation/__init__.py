"""What a plan will do, step by step, before anything runs."""

from whale.simulation.simulate import simulate
from whale.simulation.timeline import DeviceTimeline, Event, Timeline

__all__ = ["DeviceTimeline", "Event", "Timeline", "simulate"]
