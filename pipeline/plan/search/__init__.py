"""Search a plan for given costs and memory limits."""

from __future__ import annotations

from pipeline.plan.search.auto import SearchResult, auto
from pipeline.plan.search.named import Candidate, named_candidates, named_plans

__all__ = ["Candidate", "SearchResult", "auto", "named_candidates", "named_plans"]
