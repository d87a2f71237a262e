"""Groups of ranks, collectives as start/finish pairs, and the ledger of their cost."""
