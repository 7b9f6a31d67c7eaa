/*
 * The wake-up protocol as it is built: no committed job stays unclaimed while its worker sleeps.
 *
 * Polling is switched off here, and with it what a scout, a sweeper or another worker would find: a ring that is missed
 * is a state in which nothing can happen any more, with a job in it. (As it is built, such a job waits for a poll.)
 *
 * PostgreSQL is modelled by transaction ids and snapshots: a producer draws its xid, then reads the mark as it is at that
 * moment (a sequence knows no snapshots), then whether any queue needs anything (a sequence, too), then who serves with a
 * snapshot of that moment (READ COMMITTED: each statement has a new one), and commits as late as it likes; its NOTIFY
 * leaves with the commit, for who listens then. When it writes its rows does not matter: they are seen with the commit. A
 * claim sees what was committed when its snapshot was taken. One worker stands for all: a mark is that of who wrote it
 * last, so that there is one wherever each worker had one of its own.
 *
 *   AFTER_XID       taskd.enqueue_usual() and all that inserts: the mark is read when the insert has drawn the xid, and who
 *                   serves after that; without it, both before
 *   ISOLATION       taskd.ring(), taskd.after_enqueue(): above READ COMMITTED, where a snapshot is as old as its
 *                   transaction, it rings whoever serves
 *   WITHDRAW        Attendance._look: the mark is taken back before the hand-over; without it, afterwards
 *   NEW_XID         draw_xid: the bound is the id of a new transaction; without it, the xmax of a snapshot
 *   WAIT            have_ended: the consumer is certain of nothing before every lower xid has ended
 *   LAST_CLAIM      Attendance.claimed: ... and before a claim that began after that was seen
 *   FIRST           Listener._listen: the first LISTEN begins a hand-over: rings are for queues that are served only
 *   REMADE          Listener._listen: a re-made LISTEN begins a hand-over
 *   TAKEN_BACK      Attendance.doubt: a mark that was taken back is, once more, after a LISTEN was re-made
 *   LISTEN_FIRST    Listener._listen: the hand-over begins when the LISTEN is committed, and not before
 *   REBORN          Worker._be_reborn: a hand-over begins when a worker that was buried is served again
 *   OWN_XID         Attendance._look: a doubt that comes up during a hand-over has a bound of its own
 *   NEEDED          taskd.need_something(): a new worker says that something is needed, before its row counts
 *   ALONE           taskd.need_nothing(): nobody registers while another, who leaves, looks whether it was the last
 *   LATER           Attendance._written_until: a mark whose reply was lost may be written yet
 */

#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef STRICT           /* so many of them run above READ COMMITTED: the first ones */
#define STRICT 0
#endif
#ifndef SPELLS           /* how often the worker attends */
#define SPELLS 1
#endif
#ifndef BREAKS           /* the connection that listens is lost */
#define BREAKS 0
#endif
#ifndef FORGOTTEN        /* ... and the server that answers next has not heard that the mark was taken back */
#define FORGOTTEN 0
#endif
#ifndef BURIALS          /* the worker is buried alive, and begins anew */
#define BURIALS 0
#endif
#ifndef LEAVES           /* another worker leaves, of a queue that this one does not serve yet, or any more */
#define LEAVES 0
#endif
#ifndef LOST_MARKS       /* the reply to a mark is lost: the server may write it later */
#define LOST_MARKS 0
#endif

/* The database. */
bool under_way[PRODUCERS], committed[PRODUCERS], claimed[PRODUCERS];
byte xid[PRODUCERS];
byte next_xid = 1, last_ended;
bool mark, stray_mark;                 /* the queue's sequence; a value that is yet to be written */
bool served;                           /* a living row of taskd.worker has the queue */
bool needed = LEAVES > 0;              /* taskd.needs; nobody has lived before this worker, if none leaves */
bool registering;                      /* a row of taskd.worker has been written and is not committed */
bool listening, sent;                  /* sent: a notification is on its way */

/* The worker. */
bool rung;                             /* Consumer.wakeup */
bool attending, doubtful, ended, marked;
byte bound, doubts;
byte spells, breaks, forgotten, burials, lost_marks;

inline has_ended(x) { if :: x > last_ended -> last_ended = x :: else fi }

proctype Producer(byte p) {
    bool silent, strict, unserved;
    strict = p < STRICT;
#ifdef AFTER_XID
    if :: strict -> unserved = !served :: else fi;                                 /* by the transaction's snapshot */
#else
    unserved = !served; silent = mark || !needed;
#endif
    d_step { xid[p] = next_xid; next_xid++; under_way[p] = true };               /* by the insert */
#ifdef AFTER_XID
    silent = mark;                                                             /* RETURNING */
    if :: !silent -> silent = !needed :: else fi;
    if :: !strict && !silent -> unserved = !served :: else fi;                     /* where nobody attends */
#endif
    d_step {
        if
#ifdef ISOLATION
        :: strict -> skip
#endif
        :: else -> silent = silent || unserved
        fi;
        under_way[p] = false; committed[p] = true; has_ended(xid[p]);            /* the commit, and its NOTIFY */
        if :: !silent && listening -> sent = true :: else fi; silent = false; strict = false; unserved = false }
}

/* The snapshot of a moment: xmax is one more than the last xid that has ended; xmin the lowest that has not, below. */
#define XMAX (last_ended + 1)
#define RUNS_BELOW(p, x) (under_way[p] && xid[p] < x)
#if PRODUCERS == 1
#define ANY_BELOW(x) RUNS_BELOW(0, x)
#elif PRODUCERS == 2
#define ANY_BELOW(x) (RUNS_BELOW(0, x) || RUNS_BELOW(1, x))
#else
#define ANY_BELOW(x) (RUNS_BELOW(0, x) || RUNS_BELOW(1, x) || RUNS_BELOW(2, x))
#endif
#define XMIN_IS_AT_LEAST(x) (XMAX >= x && !ANY_BELOW(x))

inline begin_to_doubt() { doubtful = true; ended = false; bound = 0; doubts++ }
inline doubt() {                                                               /* Consumer.doubt */
    if
    :: !attending -> begin_to_doubt();
#ifdef TAKEN_BACK
        marked = marked || spells > 0
#endif
    :: else
    fi;
    rung = true
}

inline be_certain() {
#ifndef WITHDRAW
    mark = false; marked = false;
#endif
    doubtful = false
}

inline register_worker() {
    registering = true;
#ifdef NEEDED
    needed = true;                                                             /* by the trigger */
#endif
    d_step { registering = false; served = true }                              /* the commit */
}

proctype Consumer() {
    byte p, seen, x; bool e;
    register_worker();
end:
    do
    :: true ->
        rung = false;
        /* Attendance.before_claim */
        if
        :: attending ->
            if
            :: atomic { attending = false; begin_to_doubt() }                  /* _leave */
            :: skip
            fi
        :: !attending && spells < SPELLS -> atomic { spells++; attending = true; doubtful = false; marked = true };
            if                                                                 /* _mark: a buried worker marks nothing */
            :: mark = served
            :: atomic { lost_marks < LOST_MARKS -> lost_marks++; stray_mark = true }
            fi
        :: !attending -> skip
        fi;
        if
        :: doubtful ->                                                         /* _look */
            atomic { ended = false; seen = doubts };
#ifdef WITHDRAW
            if
            :: marked ->
                mark = false;
#ifdef LATER
                /* For so long until it has been written and has lapsed. */
                if :: stray_mark -> goto claims :: else -> mark = false fi;
#endif
#ifdef TAKEN_BACK
                atomic { if :: seen == doubts -> marked = false :: else fi }
#else
                marked = false
#endif
            :: else
            fi;
#endif
#ifdef NEW_XID
            d_step { if :: bound != 0 -> x = bound :: else -> x = next_xid; next_xid++; has_ended(x) fi };
#else
            d_step { x = (bound != 0 -> bound : XMAX) };
#endif
#ifdef WAIT
            e = XMIN_IS_AT_LEAST(x);
#else
            e = true;
#endif
            atomic {
                if
#ifdef OWN_XID
                :: seen != doubts -> skip
                :: seen == doubts ->
#else
                :: true ->
#endif
                    bound = x; ended = e
                fi; x = 0; seen = 0; e = false }
#ifndef LAST_CLAIM
            ; if :: atomic { ended -> be_certain() }; goto sleeps :: else fi
#endif
        :: else
        fi;
claims: skip;
        /* claim_jobs; a buried worker gets nothing. */
        d_step { p = 0; do :: p < PRODUCERS -> claimed[p] = claimed[p] || (served && committed[p]); p++
                        :: else -> break od; p = 0 };
        atomic { if :: doubtful && ended -> be_certain() :: else fi };         /* Attendance.claimed */
sleeps:
        if                                                                     /* Consumer._rung */
        :: attending ->
progress:   skip
        :: !attending && doubtful -> skip
        :: !attending && !doubtful ->
end_quiet:  rung
        fi
    od
}

proctype Listener() {
    bool again;
end:
    do
    :: served && !listening ->
#ifndef LISTEN_FIRST
        atomic { doubt() };
#endif
        listening = true;                                                      /* LISTEN is committed */
#ifdef LISTEN_FIRST
        atomic { if
#ifdef FIRST
        :: !again -> doubt()
#endif
#ifdef REMADE
        :: again -> doubt()
#endif
        :: else
        fi };
#endif
        again = true
    :: atomic { sent -> sent = false; rung = true }
    :: atomic { listening && breaks < BREAKS -> breaks++; listening = false; sent = false;
            if
            :: spells > 0 && forgotten < FORGOTTEN -> forgotten++; mark = served
            :: skip
            fi }
    od
}

#if BURIALS > 0
proctype Burial() {
    atomic { served -> burials++; served = false; mark = false };              /* bury_workers */
    register_worker();                                                         /* under a new id */
#ifdef REBORN
    atomic { doubt() }
#endif
}
#endif

#if LEAVES > 0
proctype Another() {                   /* retire_worker, then need_nothing */
#ifdef ALONE
    d_step { if :: !served && !registering -> needed = false :: else fi }
#else
    if :: !served -> needed = false :: else fi
#endif
}
#endif

#if LOST_MARKS > 0
proctype Server() {                    /* a mark is written late, or never; then it lapses */
end:
    do
    :: atomic { stray_mark -> stray_mark = false; if :: mark = served :: skip fi }
    od
}
#endif

proctype Judge() {                     /* where nothing can happen any more, no job is left */
    byte p;
    timeout -> do :: p < PRODUCERS -> assert(committed[p] && claimed[p]); p++ :: else -> break od
}

init {
    atomic {
        byte p;
        do :: p < PRODUCERS -> run Producer(p); p++ :: else -> break od; p = 0;
        run Consumer(); run Listener();
#if BURIALS > 0
        run Burial();
#endif
#if LOST_MARKS > 0
        run Server();
#endif
#if LEAVES > 0
        run Another();
#endif
        run Judge()
    }
}
