"""One index, many processes: a writer folds the log, readers match in the same memory.

    folder/  lock                  held by the writer
             header                one page: sequence lock, layout, pulse; each writer has its own
             TOKEN.cells.0  ...    arrays, named by writer and generation: growth makes new files
             TOKEN.fleet.7         and never moves memory under a reader

Nothing is copied and no lock is taken: a reader walks, then looks whether somebody wrote meanwhile
(`fence_kernel`), and walks again if so. ADR-0009 says what a writer's death leaves.
"""
