/*
 * The wake-up protocol as it is built: no committed job stays unclaimed while its worker sleeps.
 *
 * The model has no polling, and nothing else by which another worker would find a job: a missed notification leads to a state
 * in which nothing can happen any more, with a job left. (In taskd such a job waits for the next poll.)
 *
 * PostgreSQL is modelled by transaction ids and snapshots. A producer draws its xid. Then it reads the busy mark as it is at that
 * moment (a sequence has no snapshots), then `needs` (a sequence, too), then which workers serve the queue, with a snapshot of
 * that moment (READ COMMITTED: each statement has a new one). It commits after any time; its NOTIFY leaves with the commit, to
 * the sessions that listen then. When it writes its rows does not matter: they become visible with the commit. A claim sees what
 * was committed when its snapshot was taken. In most scenes one worker stands for all. A mark belongs to the worker that wrote
 * it last. Where there are two workers, one may give way to the mark of the other, or write its own over it, as a worker does
 * whose claims are full.
 *
 *   AFTER_XID       taskd.enqueue() and all inserts: the mark is read after the insert has drawn the xid, and the workers that
 *                   serve the queue after that; without it, both before
 *   ISOLATION       taskd.notify_workers(), taskd.run_enqueue_checks(): above READ COMMITTED, where a snapshot is as old as its
 *                   transaction, they always notify
 *   WITHDRAW        Attendance._look: the mark is cleared before the hand-over; without it, afterwards
 *   NEW_XID         draw_xid: the bound is the id of a new transaction; without it, the xmax of a snapshot
 *   WAIT            transactions_ended: the hand-over does not end before every lower xid has ended
 *   LAST_CLAIM      Attendance.claimed: ... and before a claim that began after that was seen
 *   FIRST           Listener._listen: the first LISTEN begins a hand-over, because unserved queues are not notified
 *   REMADE          Listener._listen: a LISTEN on a new connection begins a hand-over
 *   TAKEN_BACK      Attendance.doubt: after a new LISTEN, a mark that was cleared is cleared again
 *   LISTEN_FIRST    Listener._listen: the hand-over begins after the LISTEN is committed, and not before
 *   REBORN          Worker._be_reborn: a worker that was declared dead begins a hand-over when it has registered again
 *   OWN_XID         Attendance._look: a hand-over that begins during another one has a bound of its own
 *   NEEDED          taskd.turn_enqueue_checks_on(): a new worker turns the checks on before its row is visible
 *   ALONE           taskd.turn_enqueue_checks_off(): no worker registers while a leaving worker checks whether it was the last
 *   LEFT_ALONE      taskd.set_busy_mark(): a worker that gives way does not overwrite the mark of the other
 *   LATER           Attendance._written_until: a mark whose reply was lost may be written later
 */

#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef STRICT           /* how many of them, the first ones, run above READ COMMITTED */
#define STRICT 0
#endif
#ifndef WORKERS
#define WORKERS 1
#endif
#ifndef SPELLS           /* how often each worker marks the queue */
#define SPELLS 1
#endif
#ifndef BREAKS           /* how often the listening connection is lost */
#define BREAKS 0
#endif
#ifndef FORGOTTEN        /* ... and the next server has not received that the mark was cleared */
#define FORGOTTEN 0
#endif
#ifndef BURIALS          /* a live worker is declared dead, and registers again */
#define BURIALS 0
#endif
#ifndef LEAVES           /* another worker leaves, while this one does not serve the queue */
#define LEAVES 0
#endif
#ifndef LOST_MARKS       /* the reply to a mark is lost: the server may write the mark later */
#define LOST_MARKS 0
#endif

/* The database. */
bool under_way[PRODUCERS], committed[PRODUCERS], claimed[PRODUCERS];
byte xid[PRODUCERS];
byte next_xid = 1, last_ended;
byte mark;                             /* the queue's sequence: 0, or the worker of the mark, from 1 on */
bool stray_mark;                       /* a mark of the first worker that is still to be written */
bool lives[WORKERS];                   /* a living row of taskd.worker has the queue */
#if WORKERS == 1
#define served lives[0]
#else
#define served (lives[0] || lives[1])
#endif
bool needed = LEAVES > 0;              /* taskd.needs; no worker has lived before this one, if none leaves */
bool registering;                      /* a row of taskd.worker has been written and is not committed */
bool listening[WORKERS], sent[WORKERS];   /* sent: a notification is on its way */

/* The workers. */
bool notified[WORKERS];                    /* Consumer.wakeup: a notification has arrived */
bool polling[WORKERS], doubtful[WORKERS], ended[WORKERS], marked[WORKERS];
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
    if :: !strict && !silent -> unserved = !served :: else fi;                     /* if the queue is not polled */
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
    :: !polling[w] -> begin_to_doubt(w);
#ifdef TAKEN_BACK
        marked[w] = marked[w] || spells[w] > 0
#endif
    :: else
    fi;
    notified[w] = true
}

/* taskd.set_busy_mark(): a dead worker sets no mark. taskd.clear_busy_mark(): another worker's mark stays. */
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
        notified[w] = false;
        /* Attendance.before_claim */
        if
        :: polling[w] ->
            if
            :: atomic { polling[w] = false; begin_to_doubt(w) }              /* _leave, also to give way */
#if WORKERS > 1
            :: write_mark(w)                                                   /* renewed */
#endif
            :: skip
            fi
        :: !polling[w] && spells[w] < SPELLS -> atomic { spells[w]++; polling[w] = true; doubtful[w] = false; marked[w] = true };
            if                                                                 /* _mark */
            :: write_mark(w)
            :: atomic { lost_marks < LOST_MARKS -> lost_marks++; stray_mark = true }
            fi
#if WORKERS > 1
        :: atomic { !polling[w] && spells[w] < SPELLS && mark != 0 && mark != w + 1 -> spells[w]++; marked[w] = true;
#ifndef LEFT_ALONE
            write_mark(w)
#endif
            }
#endif
        :: !polling[w] -> skip
        fi;
        if
        :: doubtful[w] ->                                                      /* _look */
            atomic { ended[w] = false; seen = doubts[w] };
#ifdef WITHDRAW
            if
            :: marked[w] ->
                withdraw(w);
#ifdef LATER
                /* Until it has been written and has expired. */
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
        /* claim_jobs; a dead worker gets nothing. */
        d_step { p = 0; do :: p < PRODUCERS -> claimed[p] = claimed[p] || (lives[w] && committed[p]); p++
                        :: else -> break od; p = 0 };
        atomic { if :: doubtful[w] && ended[w] -> be_certain(w) :: else fi };  /* Attendance.claimed */
sleeps:
        if                                                                     /* Consumer._rung */
        :: polling[w] ->
progress:   skip
        :: !polling[w] && doubtful[w] -> skip
        :: !polling[w] && !doubtful[w] ->
end_quiet:  notified[w]
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
    :: atomic { sent[w] -> sent[w] = false; notified[w] = true }
    :: atomic { listening[w] && breaks < BREAKS -> breaks++; listening[w] = false; sent[w] = false;
            if
            :: spells[w] > 0 && forgotten < FORGOTTEN -> forgotten++; write_mark(w)
            :: skip
            fi }
    od
}

#if BURIALS > 0
proctype Burial() {
    atomic { lives[0] -> burials++; lives[0] = false; mark = 0 };              /* declare_workers_dead */
    register_worker(0);                                                        /* under a new id */
#ifdef REBORN
    atomic { doubt(0) }
#endif
}
#endif

#if LEAVES > 0
proctype Another() {                   /* retire_worker, then turn_enqueue_checks_off */
#ifdef ALONE
    d_step { if :: !served && !registering -> needed = false :: else fi }
#else
    if :: !served -> needed = false :: else fi
#endif
}
#endif

#if LOST_MARKS > 0
proctype Server() {                    /* a mark is written late, or never; then it expires */
end:
    do
    :: atomic { stray_mark -> stray_mark = false; if :: write_mark(0) :: skip fi }
    od
}
#endif

proctype Judge() {                     /* when nothing can happen any more, no job is left */
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
