"""Gives every Python process of a command the test device, the ranks that it starts included:

    PYTHONPATH=tests/device/site:. whale run -n 2 examples/quickstart.py
    PYTHONPATH=tests/device/site:. whale doctor --gpu -n 2 --small

Python imports this file at its start where its folder stands on the path.
"""

from tests.device.local_device import use_test_device

use_test_device()
