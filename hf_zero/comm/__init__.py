"""How bytes travel: groups of ranks, collectives as start/finish pairs, and the ledger of what they cost."""
