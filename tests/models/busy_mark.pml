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
 * claim sees what was committed when its snapshot was taken. In most scenes one worker stands for all: a mark is that of who
 * wrote it last, so that there is one wherever each worker had one of its own. Where there are two, one may give way to the
 * mark of the other, or write its own over it, as one does whose claims are full.
 *
 *   AFTER_XID       taskd.enqueue() and all that inserts: the mark is read when the insert has drawn the xid, and who
 *                   serves after that; without it, both before
 *   ISOLATION       taskd.notify_workers(), taskd.run_enqueue_checks(): above READ COMMITTED, where a snapshot is as old as its
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
 *   NEEDED          taskd.turn_enqueue_checks_on(): a new worker says that something is needed, before its row counts
 *   ALONE           taskd.turn_enqueue_checks_off(): nobody registers while another, who leaves, looks whether it was the last
 *   LEFT_ALONE      taskd.set_busy_mark(): who gives way writes no mark over the other's
 *   LATER           Attendance._written_until: a mark whose reply was lost may be written yet
 */

#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef STRICT           /* so many of them run above READ COMMITTED: the first ones */
#define STRICT 0
#endif
#ifndef WORKERS
#define WORKERS 1
#endif
#ifndef SPELLS           /* how often each worker attends */
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
byte mark;                             /* the queue's sequence: 0, or whose mark it is, from 1 on */
bool stray_mark;                       /* a value that is yet to be written, of the first worker */
bool lives[WORKERS];                   /* a living row of taskd.worker has the queue */
#if WORKERS == 1
#define served lives[0]
#else
#define served (lives[0] || lives[1])
#endif
bool needed = LEAVES > 0;              /* taskd.needs; nobody has lived before this worker, if none leaves */
bool registering;                      /* a row of taskd.worker has been written and is not committed */
bool listening[WORKERS], sent[WORKERS];   /* sent: a notification is on its way */

/* The workers. */
bool rung[WORKERS];                    /* Consumer.wakeup */
bool attending[WORKERS], doubtful[WORKERS], ended[WORKERS], marked[WORKERS];
byte bound[WORKERS], doubts[WORKERS], spells[WORKERS];
byte breaks, forgotten, burials, lost_marks;

inline has_ended(x) { if :: x > last_ended -> last_ended = x :: else fi }

proctype Producer(byte p) {
    bool silent, strict, unserved;
    strict = p < STRICT;
#ifdef AFTER_XID
    if :: strict -> unserved = !served :: else fi;                                 /* by the transaction's snapshot */
#else
    unserved = !served; silent = mark != 0 || !needed;
#endif
    d_step { xid[p] = next_xid; next_xid++; under_way[p] = true };               /* by the insert */
#ifdef AFTER_XID
    silent = mark != 0;                                                        /* RETURNING */
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
        if :: !silent && listening[0] -> sent[0] = true :: else fi;
#if WORKERS > 1
        if :: !silent && listening[1] -> sent[1] = true :: else fi;
#endif
        silent = false; strict = false; unserved = false }
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

inline begin_to_doubt(w) { doubtful[w] = true; ended[w] = false; bound[w] = 0; doubts[w]++ }
inline doubt(w) {                                                              /* Consumer.doubt */
    if
    :: !attending[w] -> begin_to_doubt(w);
#ifdef TAKEN_BACK
        marked[w] = marked[w] || spells[w] > 0
#endif
    :: else
    fi;
    rung[w] = true
}

/* taskd.set_busy_mark(): a buried worker marks nothing. taskd.clear_busy_mark(): another's mark stays. */
inline write_mark(w) { mark = (lives[w] -> w + 1 : mark) }
inline withdraw(w) { mark = (mark == w + 1 -> 0 : mark) }

inline be_certain(w) {
#ifndef WITHDRAW
    withdraw(w); marked[w] = false;
#endif
    doubtful[w] = false
}

inline register_worker(w) {
    registering = true;
#ifdef NEEDED
    needed = true;                                                             /* by the trigger */
#endif
    d_step { registering = false; lives[w] = true }                            /* the commit */
}

proctype Consumer(byte w) {
    byte p, seen, x; bool e;
    register_worker(w);
end:
    do
    :: true ->
        rung[w] = false;
        /* Attendance.before_claim */
        if
        :: attending[w] ->
            if
            :: atomic { attending[w] = false; begin_to_doubt(w) }              /* _leave, also who gives way */
#if WORKERS > 1
            :: write_mark(w)                                                   /* renewed */
#endif
            :: skip
            fi
        :: !attending[w] && spells[w] < SPELLS -> atomic { spells[w]++; attending[w] = true; doubtful[w] = false; marked[w] = true };
            if                                                                 /* _mark */
            :: write_mark(w)
            :: atomic { lost_marks < LOST_MARKS -> lost_marks++; stray_mark = true }
            fi
#if WORKERS > 1
        :: atomic { !attending[w] && spells[w] < SPELLS && mark != 0 && mark != w + 1 -> spells[w]++; marked[w] = true;
#ifndef LEFT_ALONE
            write_mark(w)
#endif
            }
#endif
        :: !attending[w] -> skip
        fi;
        if
        :: doubtful[w] ->                                                      /* _look */
            atomic { ended[w] = false; seen = doubts[w] };
#ifdef WITHDRAW
            if
            :: marked[w] ->
                withdraw(w);
#ifdef LATER
                /* For so long until it has been written and has lapsed. */
                if :: stray_mark -> goto claims :: else -> withdraw(w) fi;
#endif
#ifdef TAKEN_BACK
                atomic { if :: seen == doubts[w] -> marked[w] = false :: else fi }
#else
                marked[w] = false
#endif
            :: else
            fi;
#endif
#ifdef NEW_XID
            d_step { if :: bound[w] != 0 -> x = bound[w] :: else -> x = next_xid; next_xid++; has_ended(x) fi };
#else
            d_step { x = (bound[w] != 0 -> bound[w] : XMAX) };
#endif
#ifdef WAIT
            e = XMIN_IS_AT_LEAST(x);
#else
            e = true;
#endif
            atomic {
                if
#ifdef OWN_XID
                :: seen != doubts[w] -> skip
                :: seen == doubts[w] ->
#else
                :: true ->
#endif
                    bound[w] = x; ended[w] = e
                fi; x = 0; seen = 0; e = false }
#ifndef LAST_CLAIM
            ; if :: atomic { ended[w] -> be_certain(w) }; goto sleeps :: else fi
#endif
        :: else
        fi;
claims: skip;
        /* claim_jobs; a buried worker gets nothing. */
        d_step { p = 0; do :: p < PRODUCERS -> claimed[p] = claimed[p] || (lives[w] && committed[p]); p++
                        :: else -> break od; p = 0 };
        atomic { if :: doubtful[w] && ended[w] -> be_certain(w) :: else fi };  /* Attendance.claimed */
sleeps:
        if                                                                     /* Consumer._rung */
        :: attending[w] ->
progress:   skip
        :: !attending[w] && doubtful[w] -> skip
        :: !attending[w] && !doubtful[w] ->
end_quiet:  rung[w]
        fi
    od
}

proctype Listener(byte w) {
    bool again;
end:
    do
    :: lives[w] && !listening[w] ->
#ifndef LISTEN_FIRST
        atomic { doubt(w) };
#endif
        listening[w] = true;                                                     /* LISTEN is committed */
#ifdef LISTEN_FIRST
        atomic { if
#ifdef FIRST
        :: !again -> doubt(w)
#endif
#ifdef REMADE
        :: again -> doubt(w)
#endif
        :: else
        fi };
#endif
        again = true
    :: atomic { sent[w] -> sent[w] = false; rung[w] = true }
    :: atomic { listening[w] && breaks < BREAKS -> breaks++; listening[w] = false; sent[w] = false;
            if
            :: spells[w] > 0 && forgotten < FORGOTTEN -> forgotten++; write_mark(w)
            :: skip
            fi }
    od
}

#if BURIALS > 0
proctype Burial() {
    atomic { lives[0] -> burials++; lives[0] = false; mark = 0 };              /* bury_workers */
    register_worker(0);                                                        /* under a new id */
#ifdef REBORN
    atomic { doubt(0) }
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
    :: atomic { stray_mark -> stray_mark = false; if :: write_mark(0) :: skip fi }
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
        do :: p < WORKERS -> run Consumer(p); run Listener(p); p++ :: else -> break od; p = 0;
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
