"""What each experiment's records mean: one file each, ``summarise(run)`` and ``text(summary)``.

The two-round A/B, which every other experiment builds on, has its own in ``kvlab.summary``.
"""
