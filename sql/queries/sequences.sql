-- Advance the sequences that are behind the rows that have their values, for example after a switch-over by logical replication;
-- see taskd.sequences_behind().

-- name: mend_sequences()
-- roles: worker, admin
SELECT name, last, newest FROM taskd.mend_sequences();
