//! Memory that is not mapped, and memory of another process.

use memferry_message::plan::{PathKind, Pinning};
use memferry_message::{EndpointBuilder, Error, MemorySide, Source, TAG_ALL, TAG_ANY};
use memferry_testing::in_own_process;
use memferry_testing::message::traces::Folder;
use memferry_testing::message::{Pair, pair, unique};
use memferry_testing::pattern::pattern;

const LENGTH: usize = 4 << 20;

/// A mapping with a hole in the middle. The hole cannot be read or written.
struct HoledMapping(*mut u8);

impl HoledMapping {
    fn new() -> Self {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping; then a hole in it, which nothing uses.
        let start = unsafe {
            let start = libc::mmap(std::ptr::null_mut(), LENGTH, access, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(start.add(LENGTH / 2), 64 << 10, libc::PROT_NONE), 0);
            start
        };
        Self(start.cast())
    }
}

impl Drop for HoledMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, and no message is in flight.
        unsafe { libc::munmap(self.0.cast(), LENGTH) };
    }
}

/// Paths on which the kernel copies, with and without prefaulting.
fn paths() -> impl Iterator<Item = EndpointBuilder> {
    [PathKind::Single, PathKind::Cooperative].into_iter().flat_map(|path| {
        Pinning::ALL
            .into_iter()
            .map(move |pinning| EndpointBuilder::new().path(path).pinning(pinning))
    })
}

/// Checks that the connection still works.
fn check_still_connected(sides: &Pair) {
    let message = pattern(1 << 20, 5);
    let mut send = sides.here.isend(sides.to_there, 9, message.clone()).unwrap();
    let mut receive = sides.there.irecv(sides.to_here, 9, TAG_ALL, vec![0; 1 << 20]).unwrap();
    sides.finish(&mut [send.operation(), receive.operation()]);
    assert!(receive.wait().unwrap().1 == message);
}

#[test]
fn a_source_that_is_gone_is_reported_to_both_sides() {
    for builder in paths() {
        let (sides, source) = (pair(&builder), HoledMapping::new());
        // SAFETY: the memory stays unchanged until the operation completes; the hole is the subject
        // of the test, on paths where the kernel copies.
        let mut send =
            unsafe { sides.here.isend_raw(sides.to_there, 1, source.0, LENGTH) }.unwrap();
        let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; LENGTH]).unwrap();
        sides.finish(&mut [&mut send, receive.operation()]);
        assert_eq!(send.wait(), Err(Error::BadMemory(MemorySide::Local)));
        assert_eq!(receive.wait().unwrap_err().error, Error::BadMemory(MemorySide::Peer));
        check_still_connected(&sides);
    }
}

#[test]
fn a_target_that_is_gone_is_reported_to_both_sides() {
    for builder in paths() {
        let (sides, target) = (pair(&builder), HoledMapping::new());
        let mut send = sides.here.isend(sides.to_there, 1, pattern(LENGTH, 2)).unwrap();
        // SAFETY: as above, and no other thread accesses the memory.
        let mut receive =
            unsafe { sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, target.0, LENGTH) }.unwrap();
        sides.finish(&mut [send.operation(), &mut receive]);
        assert_eq!(send.wait().unwrap_err().error, Error::BadMemory(MemorySide::Peer));
        assert_eq!(receive.wait(), Err(Error::BadMemory(MemorySide::Local)));
        check_still_connected(&sides);
    }
}

#[test]
fn a_put_to_memory_that_cannot_be_written_blames_its_owner() {
    use memferry_message::Rights;
    let (sides, target) = (pair(&EndpointBuilder::new()), HoledMapping::new());
    // SAFETY: a mapping of this test, which no thread writes.
    assert_eq!(unsafe { libc::mprotect(target.0.cast(), 4096, libc::PROT_READ) }, 0);
    // SAFETY: the memory is mapped until the window is dropped; that it cannot be written is the
    // subject of the test.
    let window = unsafe { sides.there.expose_raw(target.0, 4096, Rights::READ_WRITE) }.unwrap();
    let remote = sides.here.attach(sides.to_there, window.handle()).unwrap();
    let error = remote.put(0, &[1u8; 4096]).unwrap_err();
    assert_eq!(error, Error::BadMemory(MemorySide::Peer));
    assert!(error.to_string().contains("on the peer's side"), "{error}");
    let mut back = vec![1u8; 4096];
    remote.get(0, &mut back).unwrap();
    // The reverse: the source of a put and the target of a get are not mapped.
    let hole = target.0.wrapping_add(LENGTH / 2);
    // SAFETY: nothing is read there: that is the subject of the test.
    let put = unsafe { remote.iput_raw(0, hole, 4096, None) }.unwrap().wait();
    assert_eq!(put.unwrap_err(), Error::BadMemory(MemorySide::Local));
    // SAFETY: nothing is written there: that is the subject of the test.
    let got = unsafe { remote.iget_raw(0, hole, 4096) }.unwrap().wait();
    assert_eq!(got.unwrap_err(), Error::BadMemory(MemorySide::Local));
}

/// Runs `child` in a fork of this process; it returns whether all was as expected.
fn in_fork(child: impl FnOnce() -> bool) {
    // SAFETY: the child only calls the library, which returns an error in it, and exits by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: exits the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child of this test.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child got another result");
}

#[test]
fn a_forked_child_is_told_that_it_is_not_the_owner() {
    if !in_own_process() {
        return;
    }
    let sides = pair(&EndpointBuilder::new());
    let mut waiting = sides.there.irecv(sides.to_here, 3, TAG_ALL, vec![0; 4]).unwrap();
    in_fork(|| {
        let (endpoint, peer) = (&sides.here, sides.to_there);
        let forked = |result: Result<(), Error>| result == Err(Error::Forked);
        forked(endpoint.send(peer, 0, b"x"))
            && forked(endpoint.recv(Source::Any, 0, TAG_ANY, &mut [0; 1]).map(drop))
            && forked(endpoint.isend(peer, 0, vec![1u8]).map(drop).map_err(|failed| failed.error))
            && forked(endpoint.connect("x").map(drop))
            && forked(endpoint.self_peer().map(drop))
            && forked(endpoint.iprobe(Source::Any, 0, TAG_ANY).map(drop))
            && forked(endpoint.ready_fd().map(drop))
            && waiting.operation().test() == Some(Err(Error::Forked))
            && !endpoint.progress()
            && !endpoint.progress_timeout(std::time::Duration::ZERO)
    });
    sides.here.send(sides.to_there, 3, b"well").unwrap();
    sides.finish(&mut [waiting.operation()]);
    assert_eq!(waiting.wait().unwrap().1, b"well");
}

#[test]
fn a_forked_child_that_drops_an_endpoint_takes_nothing_from_its_parent() {
    if !in_own_process() {
        return;
    }
    let folder = Folder::new("forked");
    let path = folder.file("socket");
    let endpoint = EndpointBuilder::new().open(&path).unwrap();
    let mut owned = Some(endpoint.clone());
    in_fork(|| {
        drop(owned.take());
        // The last handle of the child's copy. SAFETY: the child never uses the handle of the
        // parent again: it exits by `_exit`.
        drop(unsafe { std::ptr::read(&endpoint) });
        true
    });
    drop(owned);
    assert_eq!(folder.contents(), ["socket"], "the name is still the parent's");
    let other = EndpointBuilder::new().background(true).open(&unique("other")).unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| other.connect(&path).unwrap());
        memferry_testing::message::until("it has connected", || endpoint.peers().len() == 1);
        connecting.join().unwrap();
    });
}
