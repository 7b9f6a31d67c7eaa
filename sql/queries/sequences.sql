-- Sequences that are behind the rows which they count, as after a switch-over by logical replication; see
-- taskd.sequences_behind().

-- name: mend_sequences()
-- roles: worker, admin
SELECT name, last, newest FROM taskd.mend_sequences();
