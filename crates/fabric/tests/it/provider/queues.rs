//! Completion queues in all formats, counters, event queues, and waiting for them.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_fi::abi::*;

use crate::provider::world::*;

fn read(queue: *mut FidCq, array: *mut c_void, count: usize) -> isize {
    move_all_on();
    // SAFETY: the tests pass open queues, and space for `count` entries.
    unsafe { ((*(*queue).ops).read)(queue, array, count) }
}

fn wait(queue: *mut FidCq, entry: &mut CqTaggedEntry, timeout: c_int) -> isize {
    // SAFETY: the queue is open, and there is space for an entry.
    unsafe {
        let sread = (*(*queue).ops).sread;
        sread(queue, (&raw mut *entry).cast(), 1, std::ptr::null(), timeout)
    }
}

fn no_entry() -> CqTaggedEntry {
    // SAFETY: zero is a valid value of all fields.
    unsafe { std::mem::zeroed() }
}

#[test]
fn every_format_has_its_fields_and_no_more() {
    let world = World::new();
    for (format, words) in [
        (FI_CQ_FORMAT_CONTEXT, 1),
        (FI_CQ_FORMAT_MSG, 3),
        (FI_CQ_FORMAT_DATA, 5),
        (FI_CQ_FORMAT_TAGGED, 6),
    ] {
        let side = world.side_with(format, 0);
        let me = side.insert(&side.name());
        assert_eq!(me, 0);
        let mut buffer = [0; 4];
        assert_eq!((side.tinjectdata(b"four", 99, 7), side.trecv(&mut buffer, 7, 0, 5)), (0, 0));
        let mut array = [u64::MAX; 7];
        while read(side.queue, array.as_mut_ptr().cast(), 1) != 1 {}
        let flags = FI_TAGGED | FI_RECV | FI_REMOTE_CQ_DATA;
        let whole = [5, flags, 4, buffer.as_ptr() as u64, 99, 7];
        assert_eq!(array[..words], whole[..words]);
        assert!(array[words..].iter().all(|word| *word == u64::MAX));
    }
}

#[test]
fn a_queue_grows_and_gives_many_at_once() {
    let world = World::new();
    let side = world.side();
    let me = side.insert(&side.name());
    let mut buffers = vec![[0u8; 8]; 5000];
    for (index, buffer) in buffers.iter_mut().enumerate() {
        assert_eq!(side.trecv(buffer, index as u64, 0, index), 0);
    }
    for index in 0..5000u64 {
        assert_eq!(side.tsend(b"8 bytes!", me, index, 9999), 0);
    }
    let mut entries = vec![no_entry(); 300];
    let (mut sent, mut received) = (0, vec![false; 5000]);
    let end = Instant::now() + Duration::from_secs(200);
    while sent + received.iter().filter(|one| **one).count() < 10000 {
        assert!(Instant::now() < end);
        let count = read(side.queue, entries.as_mut_ptr().cast(), entries.len());
        for entry in &entries[..usize::try_from(count).unwrap_or(0)] {
            match entry.flags & FI_RECV {
                0 => sent += 1,
                _ => assert!(!std::mem::replace(&mut received[entry.op_context as usize], true)),
            }
        }
    }
    assert!(buffers.iter().all(|buffer| buffer == b"8 bytes!"));
}

#[test]
fn entries_behind_an_error_wait_until_it_is_read() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut buffers = [[0; 4]; 3];
    for (index, buffer) in buffers.iter_mut().enumerate() {
        assert_eq!(two.trecv(buffer, 1, 0, index), 0);
    }
    for bytes in [&b"good"[..], b"too long", b"fine"] {
        assert_eq!(one.tinject(bytes, 1), 0);
    }
    let mut entries = [no_entry(); 3];
    let mut count = 0;
    while count < 1 {
        let read = read(two.queue, entries.as_mut_ptr().cast(), 3);
        assert!(read == 1 || read == -(FI_EAGAIN as isize), "one before the error, not {read}");
        count = read;
    }
    assert_eq!(entries[0].op_context, context(0));
    assert_eq!(two.read_error().op_context, context(1));
    assert_eq!(two.read().op_context, context(2));
}

#[test]
fn only_operations_that_ask_are_told_where_that_is_wanted() {
    let world = World::new();
    let side = world.side_with(FI_CQ_FORMAT_TAGGED, FI_SELECTIVE_COMPLETION);
    side.insert(&side.name());
    let (mut sent, mut received) = (*b"say", [0; 3]);
    let (from, to) = (vector(&mut sent), vector(&mut received));
    for flags in [0, FI_COMPLETION] {
        assert_eq!(side.trecvmsg(&tagged_message(Some(&to), 1, 7), flags), 0);
        assert_eq!(side.tsendmsg(&tagged_message(Some(&from), 1, 8), flags), 0);
        if flags == 0 {
            side.expect_nothing();
        } else {
            let told = [side.read().op_context, side.read().op_context];
            assert!(told.contains(&context(7)) && told.contains(&context(8)));
        }
        assert_eq!(&received, b"say");
        received.fill(0);
    }
    // Errors are always reported.
    assert_eq!((side.trecv(&mut [0; 1], 1, 0, 5), side.cancel(5)), (0, 0));
    assert_eq!(side.read_error().op_context, context(5));
}

#[test]
fn the_usual_flags_can_be_changed_and_aliases_have_their_own() {
    let world = World::new();
    let side = world.side_with(FI_CQ_FORMAT_TAGGED, FI_SELECTIVE_COMPLETION);
    let me = side.insert(&side.name());
    let mut alias: *mut Fid = null_mut();
    let mut wanted = Alias { fid: &raw mut alias, flags: FI_TRANSMIT | FI_COMPLETION };
    assert_eq!(control(side.ep.cast(), FI_ALIAS, &mut wanted), 0);
    let mut flags = FI_TRANSMIT;
    assert_eq!((control(alias, FI_GETOPSFLAG, &mut flags), flags), (0, FI_COMPLETION));
    flags = FI_TRANSMIT;
    assert_eq!((control(side.ep.cast(), FI_GETOPSFLAG, &mut flags), flags), (0, 0));
    let other = Side { ep: alias.cast(), queue: null_mut(), vector: null_mut(), more: Vec::new() };
    assert_eq!((side.tsend(b"quiet", me, 1, 1), other.tsend(b"loud", me, 1, 2)), (0, 0));
    assert_eq!(side.read().op_context, context(2));
    assert_eq!(control(side.ep.cast(), FI_SETOPSFLAG, &mut (FI_TRANSMIT | FI_COMPLETION)), 0);
    assert_eq!(side.tsend(b"loud", me, 1, 3), 0);
    assert_eq!(side.read().op_context, context(3));
    assert_eq!(close(alias), 0);
    std::mem::forget(other);
}

#[test]
fn directions_may_have_queues_and_counters_of_their_own() {
    let world = World::new();
    let (sends, receives) = (world.counter(), world.counter());
    let queues = [(); 2].map(|()| world.queue(FI_CQ_FORMAT_TAGGED, FI_WAIT_NONE));
    let side = Side {
        ep: world.endpoint(),
        queue: queues[0],
        vector: world.vector(0),
        more: vec![queues[1].cast(), sends.cast(), receives.cast()],
    };
    let ep: *mut Fid = side.ep.cast();
    let flags = FI_RECV | FI_SELECTIVE_COMPLETION;
    assert_eq!((bind(ep, queues[0].cast(), FI_SEND), bind(ep, queues[1].cast(), flags)), (0, 0));
    assert_eq!((bind(ep, sends.cast(), FI_SEND), bind(ep, receives.cast(), FI_RECV)), (0, 0));
    assert_eq!(bind(ep, side.vector.cast(), 0), 0);
    side.enable();
    let me = side.insert(&side.name());
    let mut buffers = [[0; 2]; 3];
    for buffer in &mut buffers {
        assert_eq!(side.trecv(buffer, 1, 0, 7), 0);
    }
    assert_eq!((side.tsend(b"ab", me, 1, 8), side.tinject(b"cd", 1)), (0, 0));
    // SAFETY: the counters are open.
    unsafe {
        let ops = &*(*sends).ops;
        assert_eq!((ops.wait)(sends, 2, 10_000), 0);
        assert_eq!((ops.wait)(receives, 2, 10_000), 0);
        assert_eq!(((ops.read)(sends), (ops.read)(receives)), (2, 2));
        assert_eq!((ops.wait)(receives, 3, 20), -FI_ETIMEDOUT);
        assert_eq!(side.cancel(7), 0);
        assert_eq!((ops.wait)(receives, 3, 10_000), -FI_EAVAIL);
        assert_eq!((ops.readerr)(receives), 1);
        assert_eq!(((ops.add)(sends, 5), (ops.read)(sends)), (0, 7));
        assert_eq!(((ops.set)(sends, 1), (ops.read)(sends)), (0, 1));
        assert_eq!(((ops.adderr)(sends, 5), (ops.seterr)(sends, 2)), (0, 0));
        assert_eq!((ops.readerr)(sends), 2);
    }
    assert_eq!(side.read().op_context, context(8));
    let only = read_one(queues[1]).map(|read| read.0.flags);
    assert_eq!(only, Err(-FI_EAVAIL), "quiet receives are counted, and told only if they fail");
    assert_eq!(take_error(queues[1]).unwrap().err, FI_ECANCELED);
}

#[test]
fn one_queue_serves_several_endpoints() {
    let world = World::new();
    let queue = world.queue(FI_CQ_FORMAT_TAGGED, FI_WAIT_NONE);
    let vector = world.vector(0);
    let endpoints = [(); 3].map(|()| world.endpoint());
    for ep in endpoints {
        assert_eq!(bind(ep.cast(), queue.cast(), FI_SEND | FI_RECV), 0);
        assert_eq!(bind(ep.cast(), vector.cast(), 0), 0);
        assert_eq!(control(ep.cast(), FI_ENABLE, &mut 0u64), 0);
    }
    let sides = endpoints
        .map(|ep| Side { ep, queue, vector, more: Vec::new() })
        .map(std::mem::ManuallyDrop::new);
    for (number, side) in sides.iter().enumerate() {
        assert_eq!(sides[0].insert(&side.name()), number as u64);
    }
    let mut buffers = [[0; 3]; 3];
    for (number, side) in sides.iter().enumerate() {
        assert_eq!(side.trecv(&mut buffers[number], 1, 0, number), 0);
        assert_eq!(sides[0].tsend(b"all", number as u64, 1, 10 + number), 0);
    }
    let mut told: Vec<_> = (0..6).map(|_| sides[0].read().op_context as usize).collect();
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2, 10, 11, 12]);
    assert_eq!(buffers, [*b"all"; 3]);
    endpoints.iter().for_each(|ep| assert_eq!(close(ep.cast()), 0));
    assert_eq!((close(queue.cast()), close(vector.cast())), (0, 0));
}

#[test]
fn a_waiting_reader_is_woken_by_a_message() {
    let world = World::new();
    let (one, two) = world.pair();
    let (mut buffer, mut entry) = ([0; 5], no_entry());
    assert_eq!(two.trecv(&mut buffer, 1, 0, 3), 0);
    let begin = Instant::now();
    assert_eq!(wait(two.queue, &mut entry, 30), -(FI_EAGAIN as isize));
    assert!(begin.elapsed() >= Duration::from_millis(30));
    let ep = one.ep as usize;
    let sender = std::thread::spawn(move || {
        let (queue, vector) = (null_mut(), null_mut());
        let one = Side { ep: ep as *mut FidEp, queue, vector, more: Vec::new() };
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(one.tinject(b"awake", 1), 0);
        std::mem::forget(one);
    });
    // This loop also makes the progress of the sender, because this process is both sides.
    let end = Instant::now() + Duration::from_secs(200);
    while wait(two.queue, &mut entry, 100) != 1 {
        assert!(one.try_read().is_err() && Instant::now() < end);
    }
    assert_eq!((entry.op_context, &buffer), (context(3), b"awake"));
    sender.join().unwrap();
}

#[test]
fn a_waiting_reader_is_woken_by_a_signal() {
    let world = World::new();
    let side = world.side();
    let queue = side.queue as usize;
    let is_over = std::sync::Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let _guard = memferry_testing::HangGuard::new("a waiting reader is woken by a signal");
    let signaller = std::thread::spawn(move || {
        // A signal wakes only threads that wait, and the first one may precede the reader, so it is
        // repeated.
        while !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
            let queue = queue as *mut FidCq;
            // SAFETY: the queue is open.
            assert_eq!(unsafe { ((*(*queue).ops).signal)(queue) }, 0);
        }
    });
    assert_eq!(wait(side.queue, &mut no_entry(), -1), -(FI_EAGAIN as isize));
    is_over.store(true, Ordering::Relaxed);
    signaller.join().unwrap();
}

#[test]
fn every_one_of_several_waiting_readers_is_woken() {
    let world = World::new();
    let side = world.side();
    let me = side.insert(&side.name());
    for round in 0..20 {
        let mut buffers = [[0; 2]; 4];
        for buffer in &mut buffers {
            assert_eq!(side.trecv(buffer, 1, 0, 3), 0);
        }
        let queue = side.queue as usize;
        let readers = [(); 4].map(|()| {
            std::thread::spawn(move || wait(queue as *mut FidCq, &mut no_entry(), 60_000))
        });
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        for _ in 0..4 {
            // SAFETY: the endpoint is open, and the address is that of the endpoint itself.
            let sent =
                unsafe { ((*(*side.ep).tagged).inject)(side.ep, b"go".as_ptr().cast(), 2, me, 1) };
            assert_eq!(sent, 0);
        }
        assert_eq!(readers.map(|reader| reader.join().unwrap()), [1; 4]);
    }
}

#[test]
fn waits_for_different_numbers_of_a_counter_end_each_for_itself() {
    let world = World::new();
    let counter = world.counter();
    // SAFETY: the counter is open.
    unsafe {
        let ops = &*(*counter).ops;
        for _ in 0..20 {
            assert_eq!((ops.set)(counter, 0), 0);
            let at = counter as usize;
            let waiters = [1, 2, 3, 4].map(|threshold| {
                let wait = ops.wait;
                std::thread::spawn(move || wait(at as *mut FidCntr, threshold, 60_000))
            });
            for _ in 0..4 {
                std::thread::sleep(Duration::from_micros(500));
                assert_eq!((ops.add)(counter, 1), 0);
            }
            assert_eq!(waiters.map(|waiter| waiter.join().unwrap()), [0; 4]);
        }
    }
    assert_eq!(close(counter.cast()), 0);
}

#[test]
fn the_descriptor_of_a_queue_is_readable_when_something_has_come() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut descriptor: c_int = -1;
    assert_eq!(control(two.queue.cast(), FI_GETWAIT, &mut descriptor), 0);
    let mut buffer = [0; 2];
    assert_eq!(two.trecv(&mut buffer, 1, 0, 3), 0);
    // Both sides have work until they are connected.
    assert_eq!(one.tinject(b"me", 1), 0);
    two.read();
    assert_eq!(two.trecv(&mut buffer, 1, 0, 3), 0);
    let mut fid: *mut Fid = two.queue.cast();
    // SAFETY: the fabric and the queue are open.
    let try_wait = |fid: &mut *mut Fid| unsafe {
        ((*(*world.fabric).ops).trywait)(world.fabric, &raw mut *fid, 1)
    };
    let poll = |timeout| {
        let mut watched = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        // SAFETY: the call passes one structure.
        unsafe { libc::poll(&raw mut watched, 1, timeout) }
    };
    while try_wait(&mut fid) != 0 {}
    assert_eq!(poll(0), 0);
    assert_eq!(one.tinject(b"go", 1), 0);
    assert_eq!(poll(60_000), 1);
    assert_eq!(try_wait(&mut fid), -FI_EAGAIN);
    assert_eq!((two.read().op_context, &buffer), (context(3), b"go"));
}

#[test]
fn event_queues_keep_what_programs_write() {
    let world = World::new();
    // SAFETY: zero is a valid value of all fields.
    let mut attr: EqAttr = unsafe { std::mem::zeroed() };
    (attr.flags, attr.wait_obj) = (FI_WRITE, FI_WAIT_FD);
    let mut eq = null_mut();
    // SAFETY: the fabric is open, and there is space for a pointer.
    let code = unsafe {
        ((*(*world.fabric).ops).eq_open)(world.fabric, &raw mut attr, &raw mut eq, null_mut())
    };
    assert_eq!(code, 0);
    let (mut event, mut bytes) = (0u32, [0u8; 16]);
    // SAFETY: the queue is open, and all buffers are as long as the calls state.
    unsafe {
        let ops = &*(*eq).ops;
        let at: *mut c_void = bytes.as_mut_ptr().cast();
        let again = -(FI_EAGAIN as isize);
        assert_eq!((ops.read)(eq, &raw mut event, at, 16, 0), again);
        assert_eq!((ops.sread)(eq, &raw mut event, at, 16, 20, 0), again);
        assert_eq!((ops.write)(eq, FI_SHUTDOWN, c"an event".as_ptr().cast(), 8, 0), 8);
        assert_eq!((ops.read)(eq, &raw mut event, at, 4, 0), -(FI_ETOOSMALL as isize));
        assert_eq!((ops.read)(eq, &raw mut event, at, 16, FI_PEEK), 8);
        assert_eq!((ops.sread)(eq, &raw mut event, at, 16, 1000, 0), 8);
        assert_eq!((event, &bytes[..8]), (FI_SHUTDOWN, &b"an event"[..]));
        assert_eq!((ops.read)(eq, &raw mut event, at, 16, 0), again);
    }
    assert_eq!(close(eq.cast()), 0);
}
