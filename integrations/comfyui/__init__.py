"""Nodes for ComfyUI: a calibration of trueup on a MODEL, and the steps fitted to it. See README.md."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
