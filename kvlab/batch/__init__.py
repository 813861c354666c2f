"""Many runs from one file: a grid of settings, every cell measured, results side by side.

``sweep`` reads and orders the cells, ``ledger`` keeps what became of each visit, ``visits`` runs
them, ``effects`` says what each setting changed.
"""
