"""What each experiment's records mean: one file each, ``summarise(run)`` and ``text(summary)``.

What their summaries share stands in ``frame`` (head and verdict) and ``entries`` (figures).
"""
