"""Pictures of plans: text for the terminal, SVG and PNG, and a trace for Perfetto."""

from __future__ import annotations

from pipeline.plan.render.chrome_trace import chrome_trace
from pipeline.plan.render.picture import save_picture
from pipeline.plan.render.text import Box, text_boxes, text_grid
from pipeline.plan.render.timeline import Timeline, simulated

__all__ = ["Box", "Timeline", "chrome_trace", "save_picture", "simulated", "text_boxes", "text_grid"]
