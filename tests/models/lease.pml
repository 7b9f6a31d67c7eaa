/*
 * The lease protocol as it is built: who may run a job, and whose outcome counts.
 *
 * A statement is one step, as PostgreSQL runs it. What it reads of a table without locking comes from a snapshot that may be older
 * than its locks, so a claim and a rescue have two steps. Variables are the state of the database or of a process; those that
 * begin with g_ are ghosts, which only the assertions read.
 *
 * A mechanism is a #define that tests/models/check.py gives; without it, the model does what the code would do without the
 * mechanism. The docstring of check.py explains how to read a counterexample.
 *
 *   OWNER, FENCE    ack.sql: `worker_id IS NOT DISTINCT FROM $1`, `fence = ...` in the guard of every ack
 *   STRIDE          store/connections/lanes.py, Lane.draw_stride: fences grow by a random number after a broken connection
 *   KEEP_FENCE      taskd.retry(): a job that is retried has the fence with which it ended
 *   LEVEL           rescue_jobs looks for running jobs without a live owner, again and again; without it a job is rescued only
 *                   when its owner is declared dead
 *   RESCUE_GUARD    rescue_jobs: `worker_id = ANY (owners)` and `state = 'running'`, evaluated for the locked row
 *   OWNER_LIST      rescue_jobs: the owners are listed in the snapshot, and not looked up again under the lock
 *   BUDGET          rescue_jobs: `crashes >= $2 ... THEN 'failed'` (MAX_CRASHES)
 *   BLAME           rescue_jobs: a crash is charged to the last group of suspects, and only who was alone in it fails
 *   ISOLATE         claim_suspects: an isolated suspect is a group of its own
 *   OUTLIVE         quarantine.py: the next group starts when the last one has ended, or has run for a while
 *   APART           promote_jobs: `crashes = 0`; suspects are left to claim_suspects (worker/claiming/quarantine.py)
 *   RECONCILE       Reconciler: rows of this worker that it does not know are released
 *   GRACE           Reconciler._grace_s, and the connection that it shares with the claims: no claim is under way while it reads
 *   LOOKUP          acker.py, _unexplained: check_acks says why an ack has matched no row
 *   HISTORY         check_acks looks in job_history as well
 *   WORKER_LOST     check_acks: the error that a rescue adds tells a rescue from an ack, because both keep the fence
 *   ITS_CLAIM       check_acks: ... if it is of the last claim
 *   ADOPT           Runner._meet: a job that is claimed again while it runs here is not started a second time
 *   SAME_JOB        Runner._meet, _same_job: it is not adopted if a failover gave its id to another job
 *   HEED_CANCEL     ack_outcomes, rescue_jobs: a job whose cancellation was requested does not run again
 *   CANCEL_LOCKED   cancel_jobs: whether a job waits is decided from the locked row and not from the snapshot
 */

/* Bounds: how many there are of each, and how often each thing happens. */
#ifndef JOBS
#define JOBS 1
#endif
#ifndef PROCESSES
#define PROCESSES 2
#endif
#ifndef KILLS            /* kill -9 of a process, which then starts again */
#define KILLS 0
#endif
#ifndef SUSPICIONS       /* a lease runs out though the process runs: a pause, a partition */
#define SUSPICIONS 0
#endif
#ifndef LOST_CLAIMS      /* a claim is committed, or will be, and its reply is lost */
#define LOST_CLAIMS 0
#endif
#ifndef LOST_ACKS        /* the same for an ack */
#define LOST_ACKS 0
#endif
#ifndef FAILOVERS        /* to a standby that missed the last claim */
#define FAILOVERS 0
#endif
#ifndef FORGOTTEN        /* ... and even the job, whose id is then given to another one */
#define FORGOTTEN 0
#endif
#ifndef CANCELS          /* an operator cancels the job, whatever its state */
#define CANCELS 0
#endif
#ifndef FAILURES         /* an attempt fails: again, or for good */
#define FAILURES 0
#endif
#ifndef RETRIES          /* an operator retries a failed or cancelled job */
#define RETRIES 0
#endif
#ifndef RELEASES         /* a process releases a job before its end */
#define RELEASES 0
#endif
#ifndef DRAINS           /* a process drains, retires and starts again */
#define DRAINS 0
#endif
#define IDS 9            /* worker ids: 1 to IDS - 1; a run that needs more is an error of the model */
#define MAX_CRASHES 3
#define PILL 1           /* with two jobs, the second kills every process that starts it */

/* Where a job is: in `job` (live) or in `job_history`. The move is one statement, so one variable says it. */
#define QUEUED 1
#define SCHEDULED 2
#define RUNNING 3
#define DONE 4
#define FAILED 5
#define CANCELLED 6
#define ENDED(j) (job[j].state >= DONE)

/* What an attempt may send; also where it goes. */
#define RETRY 8          /* -> scheduled, and counts */
#define RELEASE 9        /* -> queued, refunded */
#define PUT_OFF 10       /* -> scheduled, refunded (IdTaken) */

typedef Row {
    byte state;
    byte owner;          /* worker_id; 0: NULL */
    byte fence;
    byte attempt;
    byte crashes;
    bool isolated;
    byte started;        /* started_at: which claim was the last */
    byte lost_by, lost_started;        /* the last of `errors` is a WorkerLost of this worker, of that claim */
    bool cancel;         /* cancel_reason */
    byte body;           /* task, arguments, enqueued_at: what _same_job compares */
    byte was, was_fence, was_started;  /* what a standby that missed the last claim has */
    byte g_run;          /* which claim runs it; never rolled back and never used twice */
    byte g_spent;        /* attempts that count and are over */
    byte g_ends;         /* final outcomes since it was born or retried */
}
Row job[JOBS];
bool registered[IDS], dead[IDS];       /* the rows of `worker`; dead: died_at is set */
bool gone[IDS];                        /* the process of this worker has ended: its death can be proved */
bool crashed[IDS];                     /* it is dead, and a job may have killed it */
byte group[IDS];                       /* `suspects`: the last group of suspects, a bit each */

/* A job that a process runs, or an outcome that its acker has. `outcome` 0: it runs. */
typedef Held {
    byte outcome, worker, fence, body;
    byte g_run;
    bool suspect, ask;   /* suspect: of the last group, and may still be about to kill */
}
typedef Place { Held at[JOBS] }
Place runs[PROCESSES], acks[PROCESSES];

#define FREE 0
#define SENT 1           /* the claim's snapshot is taken */
#define REPLIED 2        /* committed; the reply is on its way */
byte me[PROCESSES], lane[PROCESSES];
bool slow[PROCESSES], saw[PROCESSES], broken[PROCESSES], told[PROCESSES];
Place reply[PROCESSES];

/* Statements without a waiting client, which the server may still run. */
bool stray_claim, stray_slow, stray_saw, stray_broken;
byte stray_worker;
Held stray_ack;
byte stray_job;

byte kills, suspicions, lost_claims, lost_acks, failovers, cancels, failures, retries, releases, drains;
byte ids = 1, drawn = 20;
byte g_runs;                           /* claims in all */
int g_taken;                           /* runs whose outcome the database has taken, a bit each */
byte g_pill_runs;
#define TAKEN(run) ((g_taken >> run) & 1)

/* --- statements --- */

inline begin_incarnation(s) {          /* register_worker, under a fresh id of 63 random bits */
    assert(ids < IDS); me[s] = ids; registered[ids] = true; ids++; told[s] = false
}

inline claim(j, worker, breaks) {      /* claim_jobs, claim_suspects: the row is locked and wanted */
    assert(!job[j].cancel);                                   /* a job whose cancellation was requested does not run again */
    assert(job[j].attempt == job[j].g_spent);                 /* no attempt was refunded twice, or not at all */
    job[j].was = job[j].state; job[j].was_fence = job[j].fence; job[j].was_started = job[j].started;
    job[j].state = RUNNING; job[j].owner = worker; job[j].attempt++;
#ifdef STRIDE
    /* A random stride: the fence grows, to where neither the old server came nor a few steps of one will. */
    if :: breaks -> job[j].fence = drawn; drawn = drawn + 7 :: else -> job[j].fence++ fi;
#else
    job[j].fence++;
#endif
    g_runs++; assert(g_runs < 31); job[j].g_run = g_runs; job[j].started = g_runs
}

inline finish(j, how) {                   /* DELETE FROM job ... INSERT INTO job_history: one step */
    job[j].g_ends++; assert(job[j].g_ends == 1);              /* one final outcome */
    job[j].state = how
}

#ifdef OWNER
#define IS_OWNER(a) (job[j].owner == a.worker)
#else
#define IS_OWNER(a) true
#endif
#ifdef FENCE
#define IS_FENCE(a) (job[j].fence == a.fence)
#else
#define IS_FENCE(a) true
#endif

inline ack(j, how, mine) {          /* ack_done, ack_outcomes; `mine`: a row matched */
    mine = job[j].state == RUNNING && IS_OWNER(how) && IS_FENCE(how);
    if
    :: mine ->
        assert(how.g_run == job[j].g_run);                    /* no stale outcome is accepted */
        g_taken = g_taken | (1 << how.g_run);
        if
        :: how.outcome == RELEASE || how.outcome == PUT_OFF -> job[j].attempt--
        :: how.outcome == DONE -> skip
        :: else -> job[j].g_spent++; job[j].lost_by = 0; job[j].lost_started = 0
        fi;
        if
        :: how.outcome >= DONE && how.outcome <= CANCELLED -> finish(j, how.outcome)
#ifdef HEED_CANCEL
        :: how.outcome > CANCELLED && job[j].cancel -> finish(j, CANCELLED)
        :: how.outcome > CANCELLED && !job[j].cancel ->
#else
        :: how.outcome > CANCELLED ->
#endif
            job[j].owner = 0; job[j].g_run = 0;
            job[j].state = (how.outcome == RELEASE && job[j].crashes == 0 -> QUEUED : SCHEDULED)
        fi
    :: else
    fi
}

#ifdef HEED_CANCEL
#define MAY_FAIL(j) (!job[j].cancel)
#else
#define MAY_FAIL(j) true
#endif

#define IN_GROUP(j, w) ((group[w] >> j) & 1)
byte w_; bool charged, guilty;         /* of rescue(), a single step */

inline rescue(j) {                     /* rescue_jobs: what becomes of one row */
    assert(dead[job[j].owner]);                               /* nothing is taken from a worker that lives */
    w_ = job[j].owner;
#ifdef BLAME
    charged = crashed[w_] && (IN_GROUP(j, w_) || group[w_] == 0 || job[j].crashes == 0);
    guilty = charged && job[j].isolated && group[w_] == (1 << j) && job[j].crashes + 1 >= MAX_CRASHES;
#else
    charged = crashed[w_];
    guilty = charged && job[j].crashes + 1 >= MAX_CRASHES;
#endif
    job[j].isolated = job[j].isolated || (charged && (IN_GROUP(j, w_) || job[j].crashes >= 2));
    job[j].crashes = job[j].crashes + charged;
    if :: charged -> job[j].g_spent++ :: else -> job[j].attempt-- fi;
    job[j].lost_by = w_; job[j].lost_started = job[j].started;
    job[j].g_run = 0; w_ = 0; charged = false;
    if
#ifdef HEED_CANCEL
    :: job[j].cancel -> finish(j, CANCELLED)
#endif
#ifdef BUDGET
    :: MAY_FAIL(j) && guilty ->
#if JOBS > 1 && KILLS + SUSPICIONS == 0
        assert(j == PILL);                                    /* a pill fails nobody but itself */
#endif
        finish(j, FAILED)
#endif
    :: else -> job[j].state = SCHEDULED; job[j].owner = 0
    fi;
    guilty = false
}

/* --- a worker process --- */

inline forget(held) {
    held.outcome = 0; held.worker = 0; held.fence = 0; held.body = 0; held.g_run = 0; held.suspect = false;
    held.ask = false
}

inline copy(to, from) {
    to.outcome = from.outcome; to.worker = from.worker; to.fence = from.fence; to.body = from.body;
    to.g_run = from.g_run; to.suspect = from.suspect; to.ask = false
}

inline say(s, j, how) {                /* OutcomeRecorder: the acker has the outcome; the handler is over */
    copy(acks[s].at[j], runs[s].at[j]); acks[s].at[j].outcome = how; forget(runs[s].at[j])
}

inline drop_claim(s) {                 /* no client waits for the claim any more */
    if
    :: lane[s] == SENT && !stray_claim -> stray_claim = true; stray_slow = slow[s]; stray_saw = saw[s]; stray_worker = me[s];
        stray_broken = broken[s]; broken[s] = true
    :: else
    fi;
    lane[s] = FREE; slow[s] = false; saw[s] = false;
    k = 0; do :: k < JOBS -> forget(reply[s].at[k]); k++ :: else -> break od; k = 0
}

inline die(s) {                        /* it loses its state, and systemd starts it again */
    drop_claim(s);
    do :: k < JOBS -> forget(runs[s].at[k]); forget(acks[s].at[k]); k++ :: else -> break od; k = 0;
    gone[me[s]] = true; broken[s] = false; begin_incarnation(s)
}
inline take(s, j) {                    /* Runner.add, _prepare: a claimed job is here */
    if
    :: runs[s].at[j].g_run == 0 -> copy(runs[s].at[j], reply[s].at[j])
#ifdef ADOPT
#ifdef SAME_JOB
    :: runs[s].at[j].g_run != 0 && runs[s].at[j].body != reply[s].at[j].body ->
        runs[s].at[j].fence = 0;       /* NO_FENCE: its outcome is nobody's */
        copy(acks[s].at[j], reply[s].at[j]); acks[s].at[j].outcome = PUT_OFF
    :: runs[s].at[j].g_run != 0 && runs[s].at[j].body == reply[s].at[j].body ->
#else
    :: runs[s].at[j].g_run != 0 ->
        assert(runs[s].at[j].body == reply[s].at[j].body);    /* no handler's outcome is taken for another job's */
#endif
        runs[s].at[j].worker = reply[s].at[j].worker; runs[s].at[j].fence = reply[s].at[j].fence;
        runs[s].at[j].g_run = reply[s].at[j].g_run
#else
    :: else -> assert(false)                                  /* no process runs a job twice at a time */
#endif
    fi;
    forget(reply[s].at[j])
}

inline says_lost(s, j) {               /* events.job_lost */
    assert(failovers > 0 || !TAKEN(acks[s].at[j].g_run) || job[j].fence != acks[s].at[j].fence);
    forget(acks[s].at[j])
}

inline unexplained(s, j) {
#ifdef LOOKUP
    acks[s].at[j].ask = true
#else
    says_lost(s, j)
#endif
}

#ifdef HISTORY
#define FOUND(j) true
#else
#define FOUND(j) (!ENDED(j))
#endif
#ifdef ITS_CLAIM
#define LAST_CLAIM(j) (job[j].lost_started == job[j].started)
#else
#define LAST_CLAIM(j) true
#endif
#ifdef WORKER_LOST
#define RESCUED(j, a) (job[j].lost_by == a.worker && LAST_CLAIM(j))
#else
#define RESCUED(j, a) false
#endif

inline check(s, j) {                   /* check_acks */
    if
    :: !FOUND(j) -> says_lost(s, j)
    :: FOUND(j) && (job[j].fence != acks[s].at[j].fence || (job[j].owner != 0 && job[j].owner != acks[s].at[j].worker)
                    || RESCUED(j, acks[s].at[j])) -> says_lost(s, j)
    :: (FOUND(j) && job[j].fence == acks[s].at[j].fence && !RESCUED(j, acks[s].at[j])
        && job[j].state == RUNNING && job[j].owner == acks[s].at[j].worker) -> acks[s].at[j].ask = false
    :: else ->                                                /* nothing is believed written that was not */
        assert(failovers > 0 || TAKEN(acks[s].at[j].g_run)); forget(acks[s].at[j])
    fi
}

#if JOBS > 1
#define ANY(what) (what(0) || what(1))
#define ALL(what) (what(0) && what(1))
#define PICK(what) if :: what(0) -> j = 0 :: what(1) -> j = 1 fi
#else
#define ANY(what) what(0)
#define ALL(what) what(0)
#define PICK(what) what(0)
#endif
#define HOT(j) (job[j].state == QUEUED)
#define DUE_SUSPECT(j) (job[j].state == SCHEDULED && job[j].crashes > 0)
#ifdef ISOLATE
#define ALONE(j) (job[j].isolated)
#else
#define ALONE(j) false
#endif
#define DUE_IN_GROUP(j) (DUE_SUSPECT(j) && !ALONE(j))
#ifdef OUTLIVE
#define HERE_SUSPECT(j) (runs[s].at[j].suspect)
#else
#define HERE_SUSPECT(j) false
#endif
#define OUTLIVES(j) (runs[s].at[j].suspect && !(JOBS > 1 && j == PILL))       /* a pill kills at once */
#define RUNS_HERE(j) (runs[s].at[j].g_run != 0 && !(JOBS > 1 && j == PILL) && acks[s].at[j].outcome == 0)
#define HELD_HERE(j) (runs[s].at[j].g_run != 0 && acks[s].at[j].outcome == 0)
/* IdTaken puts the job off for ten seconds, for which this process leaves it alone until its own handler has ended. */
#define PUT_OFF_HERE(j) (runs[s].at[j].g_run != 0 && runs[s].at[j].fence == 0)
#define TO_SEND(j) (acks[s].at[j].outcome != 0 && !acks[s].at[j].ask)
#define TO_ASK(j) (acks[s].at[j].outcome != 0 && acks[s].at[j].ask)
#define NOTHING_HERE(j) (runs[s].at[j].g_run == 0 && acks[s].at[j].outcome == 0)
#define CLAIMED_HERE(j) (reply[s].at[j].g_run != 0)
#define TAKEABLE(j) (reply[s].at[j].g_run == 0 || acks[s].at[j].outcome == 0)
#define STRANGER(j) (job[j].state == RUNNING && job[j].owner == me[s] && NOTHING_HERE(j))
#define ASKED(j) (RUNS_HERE(j) && job[j].cancel && job[j].g_run == runs[s].at[j].g_run)
#ifdef GRACE
#define NO_CLAIM (lane[s] == FREE)
#else
#define NO_CLAIM true
#endif

proctype Process(byte s) {
    byte j, k; bool mine, together;
    atomic { begin_incarnation(s) }
end:
    do
    /* Consumer._claim, Quarantine.tick: the snapshot says whether this worker lives. */
    :: d_step { lane[s] == FREE && !told[s] && !ANY(PUT_OFF_HERE) && ANY(HOT) ->
            lane[s] = SENT; slow[s] = false; saw[s] = !dead[me[s]] }
    :: d_step { lane[s] == FREE && !told[s] && !ANY(PUT_OFF_HERE) && ANY(DUE_SUSPECT) && !ANY(HERE_SUSPECT) ->
            lane[s] = SENT; slow[s] = true; saw[s] = !dead[me[s]] }
    :: d_step { lane[s] == SENT && !saw[s] -> lane[s] = FREE; slow[s] = false; told[s] = true }
    :: atomic { lane[s] == SENT && saw[s] && lost_claims < LOST_CLAIMS && !stray_claim -> lost_claims++; drop_claim(s) }
    :: atomic { lane[s] == SENT && saw[s] ->
            lane[s] = REPLIED; saw[s] = false; j = 0; together = ANY(DUE_IN_GROUP);
            do
            :: j < JOBS ->
                if
                :: ((!slow[s] && HOT(j))
                    || (slow[s] && (together -> DUE_IN_GROUP(j) : DUE_SUSPECT(j) && !ANY(CLAIMED_HERE)))) ->
                    claim(j, me[s], broken[s]);
                    reply[s].at[j].g_run = job[j].g_run; reply[s].at[j].worker = me[s];
                    reply[s].at[j].fence = job[j].fence; reply[s].at[j].body = job[j].body;
                    reply[s].at[j].suspect = slow[s];
                    if :: slow[s] -> k = k | (1 << j) :: else fi
                /* A group may be smaller than what is due. */
                :: slow[s] && together && DUE_IN_GROUP(j) && k != 0 -> skip
                :: else
                fi;
                j++
            :: else -> break
            od; j = 0;
            if :: k != 0 && !dead[me[s]] -> group[me[s]] = k :: else fi; k = 0; together = false }
    :: atomic { ANY(OUTLIVES) -> PICK(OUTLIVES); runs[s].at[j].suspect = false; j = 0 }
    :: atomic { lane[s] == REPLIED && lost_claims < LOST_CLAIMS && ANY(CLAIMED_HERE) -> lost_claims++; drop_claim(s) }
    :: atomic { lane[s] == REPLIED && ALL(TAKEABLE) ->
            lane[s] = FREE; slow[s] = false; j = 0;
            do :: j < JOBS -> if :: CLAIMED_HERE(j) -> take(s, j) :: else fi; j++ :: else -> break od; j = 0 }

    /* Handlers end, in one of the ways of core/outcomes/policy.py. */
    :: atomic { ANY(RUNS_HERE) -> PICK(RUNS_HERE); say(s, j, DONE); j = 0 }
    :: atomic { failures < FAILURES && ANY(RUNS_HERE) -> failures++; PICK(RUNS_HERE);
            if :: say(s, j, RETRY) :: say(s, j, FAILED) fi; j = 0 }
    :: atomic { ANY(ASKED) -> PICK(ASKED); say(s, j, CANCELLED); j = 0 }
    /* Released: not started, interrupted by a stop, or by the self-fence of a worker that was declared dead or is cut off. */
    :: atomic { releases < RELEASES && ANY(HELD_HERE) -> releases++; PICK(HELD_HERE); say(s, j, RELEASE); j = 0 }
    :: atomic { drains < DRAINS && lane[s] == FREE && ALL(NOTHING_HERE) ->      /* retire_worker, and a new process */
            drains++; dead[me[s]] = true; gone[me[s]] = true; broken[s] = false; begin_incarnation(s) }

    /* Acker: an ack without a reply is sent again; one that matched no row is looked up. */
    :: atomic { ANY(TO_SEND) -> PICK(TO_SEND); ack(j, acks[s].at[j], mine);
            if
            :: mine -> forget(acks[s].at[j])
            :: !mine -> unexplained(s, j)
            :: lost_acks < LOST_ACKS -> lost_acks++                             /* written or not, the reply is lost: it is sent again */
            fi; mine = false; j = 0 }
    :: atomic { lost_acks < LOST_ACKS && ANY(TO_SEND) && stray_ack.outcome == 0 ->      /* the server runs it later */
            lost_acks++; PICK(TO_SEND); copy(stray_ack, acks[s].at[j]); stray_job = j; j = 0 }
    :: atomic { ANY(TO_ASK) -> PICK(TO_ASK); check(s, j); j = 0 }

    /* Reconciler: rows that this worker does not know, with the fence that they have. */
#ifdef RECONCILE
    :: atomic { NO_CLAIM && ANY(STRANGER) -> PICK(STRANGER);
            assert(reply[s].at[j].g_run != job[j].g_run);     /* no row is released whose reply is on its way */
            acks[s].at[j].worker = me[s]; acks[s].at[j].fence = job[j].fence; acks[s].at[j].outcome = RELEASE;
            acks[s].at[j].g_run = job[j].g_run; j = 0 }
#endif

    /* A lease renewal returns no row: the worker takes a new id. Running jobs go on under the id that claimed them. */
    :: atomic { dead[me[s]] && lane[s] == FREE -> begin_incarnation(s) }

#if JOBS > 1
    :: atomic { runs[s].at[PILL].g_run != 0 -> g_pill_runs++;
            assert(g_pill_runs <= MAX_CRASHES);               /* a pill runs three times */
            die(s) }
#endif
    :: atomic { kills < KILLS && !ENDED(0) -> kills++; die(s) }
    od
}

/* --- what the server and all workers do --- */

#define STRAY_FITS(j) ((!stray_slow && HOT(j)) || (stray_slow && DUE_SUSPECT(j)))
proctype Server() {                    /* statements without a waiting client */
    byte j; bool mine;
end:
    do
    :: atomic { stray_claim ->
            if
            :: stray_saw ->
                if
                :: ANY(STRAY_FITS) -> PICK(STRAY_FITS); claim(j, stray_worker, stray_broken);
                    if :: stray_slow && !dead[stray_worker] -> group[stray_worker] = 1 << j :: else fi
                :: skip
                fi
            :: else
            fi;
            stray_claim = false; stray_slow = false; stray_saw = false; stray_broken = false; stray_worker = 0; j = 0 }
    :: atomic { stray_ack.outcome != 0 -> j = stray_job;
            if :: ack(j, stray_ack, mine) :: skip fi;
            forget(stray_ack); stray_job = 0; mine = false; j = 0 }
    od
}

#define ORPHAN(j) (job[j].state == RUNNING && dead[job[j].owner])
#ifdef APART
#define PROMOTABLE(j) (job[j].state == SCHEDULED && job[j].crashes == 0)
#else
#define PROMOTABLE(j) (job[j].state == SCHEDULED)
#endif

#define UNDECLARED(w) (gone[w] && !dead[w])
#define ANY_UNDECLARED (UNDECLARED(1) || UNDECLARED(2) || UNDECLARED(3) || UNDECLARED(4) || UNDECLARED(5) || UNDECLARED(6) \
                      || UNDECLARED(7) || UNDECLARED(8))

inline declare_dead(w) {
    dead[w] = true; crashed[w] = gone[w];
#ifndef LEVEL
    j = 0;
    do :: j < JOBS -> if :: job[j].state == RUNNING && job[j].owner == w -> rescue(j) :: else fi; j++
       :: else -> break od; j = 0
#endif
}

proctype Promoter() {                  /* promote_jobs, by any worker */
    byte j;
end:
    do
    :: atomic { ANY(PROMOTABLE) -> PICK(PROMOTABLE); job[j].state = QUEUED; j = 0 }
    od
}

proctype Rescuer() {                   /* Rescuer.tick, by any worker */
    byte j, w, seen; bool lives[IDS];
end:
    do
    /* declare_workers_dead: its process has provably ended, so it has crashed. */
    :: atomic { ANY_UNDECLARED -> w = 1; do :: !UNDECLARED(w) -> w++ :: else -> break od; declare_dead(w); w = 0 }
    /* Silent for the length of a lease, but alive: this says nothing about its jobs. */
    :: atomic { suspicions < SUSPICIONS && !ENDED(0) && (!dead[me[0]] || !dead[me[1]]) ->
            if :: !dead[me[0]] -> w = me[0] :: !dead[me[1]] -> w = me[1] fi; suspicions++; declare_dead(w); w = 0 }
#ifdef LEVEL
    :: atomic { ANY(ORPHAN) -> PICK(ORPHAN); seen = job[j].owner;               /* rescue_jobs: the snapshot */
#ifndef OWNER_LIST
            w = 1; do :: w < IDS -> lives[w] = registered[w] && !dead[w]; w++ :: else -> break od;
#endif
            w = 0 };
       atomic {                                                                 /* ... and the lock */
            if
#ifndef RESCUE_GUARD
            :: !ENDED(j) -> rescue(j)
#else
#ifdef OWNER_LIST
            :: job[j].state == RUNNING && job[j].owner == seen -> rescue(j)
#else
            :: job[j].state == RUNNING && !lives[job[j].owner] -> rescue(j)
#endif
#endif
            :: else
            fi;
#ifndef OWNER_LIST
            do :: w < IDS -> lives[w] = false; w++ :: else -> break od; w = 0;
#endif
            j = 0; seen = 0 }
#endif
    od
}

#if CANCELS + RETRIES > 0
proctype Operator() {
    byte was;
end:
    do
    :: cancels < CANCELS && !ENDED(0) -> atomic { cancels++; was = job[0].state };      /* cancel_jobs: the snapshot */
       atomic {                                                                         /* ... and the lock */
#ifdef CANCEL_LOCKED
            was = job[0].state;
#endif
            if
            :: ENDED(0) -> skip
            :: !ENDED(0) && was == RUNNING -> job[0].cancel = (job[0].state == RUNNING || job[0].cancel)
            :: !ENDED(0) && was != RUNNING ->
                assert(job[0].state != RUNNING);              /* a running job is not ended, its cancellation is requested */
                finish(0, CANCELLED); job[0].owner = 0
            fi;
            was = 0 }
    :: atomic { retries < RETRIES && (job[0].state == FAILED || job[0].state == CANCELLED) ->      /* taskd.retry() */
            retries++; job[0].state = QUEUED; job[0].owner = 0; job[0].crashes = 0; job[0].isolated = false; job[0].cancel = false;
#ifndef KEEP_FENCE
            job[0].fence = 0;
#endif
            job[0].g_run = 0; job[0].g_ends = 0 }
    od
}
#endif

#if FAILOVERS > 0
inline cut(s) {                        /* its connections break; statements that it had sent are lost with the old server */
    broken[s] = true; lane[s] = FREE; slow[s] = false; saw[s] = false; forget(reply[s].at[0])
}

proctype Failover() {
end:
    do
    :: atomic { failovers < FAILOVERS && job[0].state == RUNNING && job[0].g_run != 0 ->
            failovers++; stray_claim = false; stray_slow = false; stray_saw = false; stray_broken = false; stray_worker = 0;
            forget(stray_ack); stray_job = 0; cut(0); cut(1);
            if
            :: job[0].state = job[0].was; job[0].fence = job[0].was_fence; job[0].started = job[0].was_started;
               job[0].attempt--
#if FORGOTTEN
            :: job[0].state = QUEUED; job[0].fence = 0; job[0].attempt = 0; job[0].crashes = 0; job[0].isolated = false; job[0].g_spent = 0;
               job[0].lost_by = 0; job[0].lost_started = 0; job[0].started = 0; job[0].body++
#endif
            fi;
            job[0].owner = 0; job[0].cancel = false; job[0].g_run = 0 }
    od
}
#endif

proctype Judge() {                     /* when nothing can happen any more, all jobs have ended, and only once */
    byte j;
    timeout ->
    do
    :: j < JOBS ->
        assert(ENDED(j));
        assert(job[j].attempt == job[j].g_spent + (job[j].state == DONE -> 1 : 0));
        assert(JOBS == 1 || j == PILL || KILLS > 0 || job[j].state == DONE);
        j++
    :: else -> break
    od
}

init {
    atomic {
        byte j;
        do :: j < JOBS -> job[j].state = QUEUED; j++ :: else -> break od; j = 0;
        do :: j < PROCESSES -> run Process(j); j++ :: else -> break od; j = 0;
        run Server(); run Promoter(); run Rescuer();
#if CANCELS + RETRIES > 0
        run Operator();
#endif
#if FAILOVERS > 0
        run Failover();
#endif
        run Judge()
    }
}
