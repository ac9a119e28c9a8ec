"""Devices and links that are not there: every action and message takes the time that the cost model
gives them (docs/emulation.md).
"""
