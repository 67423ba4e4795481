"""Ray: processes, placements, waits with deadlines. The only room that imports ray."""
