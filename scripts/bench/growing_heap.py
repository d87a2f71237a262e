"""Imported first by the process that forks the ranks: it collects no garbage until `frozen_heap`, which is imported last.

What is imported stays, and looking through it again and again takes a seventh of its time.
"""

import gc

gc.disable()
