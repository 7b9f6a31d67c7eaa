-- Advance the sequences whose last value is lower than the ids in the rows, for example after a switch-over by logical
-- replication; see taskd.sequences_behind().

-- name: mend_sequences()
-- roles: worker, admin
SELECT name, last, newest FROM taskd.mend_sequences();
