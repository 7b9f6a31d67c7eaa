-- Unique keys: who holds one, and frees it by hand.

-- See taskd.find_key() and taskd.forget_key().

-- name: find_key(task text, unique_key text)
-- roles: admin
SELECT job_id, state, key_scope, held_until, version FROM taskd.find_key($1, $2);

-- name: forget_key(task text, unique_key text, reason text, actor text)
-- roles: admin
SELECT taskd.forget_key($1, $2, $3, $4) AS forgotten;
