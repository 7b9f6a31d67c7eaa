-- The lines that handlers log, kept with their attempts (`keep_logs`).
--
-- A table of its own, one row for an attempt: a job whose handler logs nothing, or of whose task nothing is kept, has
-- none, and neither claims nor acks know of it. Its worker writes it beside the outcome, never before it and never in its
-- way; while a long attempt runs, the row is written anew every few seconds, so that a crash of the worker leaves what
-- was said until then. A row goes with its time: that of a job which ends as the attempt did, when it did.
--
-- step: expand
-- works with: >= 6

CREATE TABLE taskd.job_log (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,                  -- of the attempt: each claim has another one
    worker_id bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    attempt smallint NOT NULL,
    ended boolean NOT NULL,                 -- false: it runs, or its worker has died
    first smallint NOT NULL,                -- so many lines stand before those that were left out
    left_out bigint NOT NULL,
    lines jsonb NOT NULL CONSTRAINT lines_are_bounded CHECK (octet_length(lines::text) <= 131072),
    PRIMARY KEY (job_id, fence)
);
CREATE INDEX job_log_expires ON taskd.job_log (expires_at);
