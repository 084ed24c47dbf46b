//! Calls that are invalid, too late or too early: each has a defined result.

use std::io::IoSlice;

use memferry_message::{
    ConnectError, Endpoint, EndpointBuilder, Error, Job, Link, Listener, MAX_SEGMENTS, Rights,
    Segment, Source, TAG_ALL, TAG_ANY, ValidationError,
};
use memferry_testing::message::traces::Folder;
use memferry_testing::message::{pair, process, raw_peer, unique, until};
use memferry_testing::pattern::pattern;

#[test]
fn a_peer_of_another_endpoint_is_unknown() {
    let (ours, others) = (pair(&EndpointBuilder::new()), pair(&EndpointBuilder::new()));
    let unknown = Err(Error::Validation(ValidationError::UnknownPeer));
    assert_eq!(ours.here.send(others.to_there, 0, b"x"), unknown);
    let mut buffer = [0; 1];
    let received = ours.here.recv(others.to_there, 0, TAG_ANY, &mut buffer);
    assert_eq!(received.map(drop), unknown);
    assert_eq!(ours.here.name_of(others.to_there).map(drop), unknown);
    assert_eq!(ours.here.peer_access(others.to_there).map(drop), unknown);
}

#[test]
fn a_closed_endpoint_says_so() {
    let sides = pair(&EndpointBuilder::new());
    let (clone, to_there) = (sides.here.clone(), sides.to_there);
    let mut waiting = sides.here.irecv(to_there, 0, TAG_ANY, vec![0u8; 8]).unwrap();
    let mut pending = sides.here.isend(to_there, 0, pattern(1 << 20, 1)).unwrap();
    assert!(!waiting.is_done() && !pending.is_done());
    clone.close();
    assert_eq!(waiting.wait().unwrap_err().error, Error::Closed);
    let failed = pending.wait().unwrap_err();
    assert_eq!(failed.error, Error::Closed);
    assert!(failed.buffer == Some(pattern(1 << 20, 1)), "the buffer is returned");
    assert_eq!(sides.here.send(to_there, 0, b"x"), Err(Error::Closed));
    assert_eq!(sides.here.recv(Source::Any, 0, TAG_ANY, &mut [0; 1]), Err(Error::Closed));
    assert_eq!(sides.here.probe(Source::Any, 0, TAG_ANY), Err(Error::Closed));
    assert_eq!(sides.here.connect("somebody"), Err(Error::Closed));
    assert!(sides.here.peers().is_empty());
    let error = sides.there.recv(sides.to_here, 0, TAG_ANY, &mut [0; 1]).unwrap_err();
    assert!(matches!(error, Error::PeerDisconnected(_)), "{error}");
}

#[test]
fn messages_of_no_length_arrive() {
    let sides = pair(&EndpointBuilder::new());
    sides.here.send(sides.to_there, 7, &[]).unwrap();
    sides.here.send(sides.to_there, 8, &[IoSlice::new(&[]), IoSlice::new(&[])][..]).unwrap();
    // SAFETY: there is no memory.
    unsafe { sides.here.isend_raw(sides.to_there, 9, std::ptr::null(), 0) }
        .unwrap()
        .wait()
        .unwrap();
    // SAFETY: as above.
    unsafe { sides.here.isend_segments_raw(sides.to_there, 10, &[]) }.unwrap().wait().unwrap();
    for tag in 7..=10 {
        let received = sides.there.recv(sides.to_here, tag, TAG_ALL, &mut []).unwrap();
        assert_eq!((received.tag, received.length), (tag, 0));
    }
}

#[test]
fn a_null_pointer_with_a_length_is_refused() {
    let sides = pair(&EndpointBuilder::new());
    let refused = Error::Validation(ValidationError::NullPointer(5));
    // SAFETY: rejected before the memory is accessed.
    let sent = unsafe { sides.here.isend_raw(sides.to_there, 0, std::ptr::null(), 5) };
    assert_eq!(sent.unwrap_err(), refused);
    // SAFETY: as above.
    let received =
        unsafe { sides.here.irecv_raw(Source::Any, 0, TAG_ANY, std::ptr::null_mut(), 5) };
    assert_eq!(received.unwrap_err(), refused);
}

#[test]
fn too_many_pieces_are_refused_and_as_many_as_may_be_arrive() {
    let sides = pair(&EndpointBuilder::new());
    let mut bytes = pattern(100 * MAX_SEGMENTS, 4);
    let at = bytes.as_mut_ptr();
    for piece_bytes in [3, 100] {
        let piece = |index| Segment::source(at.wrapping_add(piece_bytes * index), piece_bytes);
        let pieces: Vec<_> = (0..MAX_SEGMENTS).map(piece).collect();
        let length = piece_bytes * MAX_SEGMENTS;
        // SAFETY: the bytes live and stay as they are until the end of the test.
        let mut send =
            unsafe { sides.here.isend_segments_raw(sides.to_there, 0, &pieces) }.unwrap();
        let mut receive = sides.there.irecv(sides.to_here, 0, TAG_ANY, vec![0; length]).unwrap();
        sides.finish(&mut [&mut send, receive.operation()]);
        assert!(receive.wait().unwrap().1 == bytes[..length]);
    }
    let too_many = vec![Segment::source(at, 1); MAX_SEGMENTS + 1];
    // SAFETY: refused before anybody looks at the memory.
    let error = unsafe { sides.here.isend_segments_raw(sides.to_there, 0, &too_many) }.unwrap_err();
    assert_eq!(error, Error::Validation(ValidationError::TooManySegments(MAX_SEGMENTS + 1)));
    let too_long = [Segment::source(at, usize::MAX), Segment::source(at, usize::MAX)];
    // SAFETY: as above.
    let error = unsafe { sides.here.isend_segments_raw(sides.to_there, 0, &too_long) }.unwrap_err();
    assert_eq!(error, Error::Validation(ValidationError::TooLong));
}

#[test]
fn two_receives_into_the_same_memory_both_end_and_touch_nothing_else() {
    let sides = pair(&EndpointBuilder::new());
    let mut memory = memferry_testing::message::memory::GuardedBuffer::plain(100_000);
    let at = memory.address();
    // SAFETY: the memory lives until both operations complete; two receives share a part of it,
    // whose bytes the test does not use.
    let (mut one, mut other) = unsafe {
        let one = sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, at, 70_000).unwrap();
        (one, sides.there.irecv_raw(sides.to_here, 2, TAG_ALL, at.add(30_000), 70_000).unwrap())
    };
    let (first, second) = (pattern(70_000, 1), pattern(70_000, 2));
    sides.here.scope(|scope| {
        let mut sends = [
            scope.isend(sides.to_there, 1, &first).unwrap(),
            scope.isend(sides.to_there, 2, &second).unwrap(),
        ];
        let [a, b] = &mut sends;
        sides.finish(&mut [&mut one, &mut other, a.operation(), b.operation()]);
    });
    assert!(one.wait().is_ok() && other.wait().is_ok());
    memory.check_guards();
    assert!(memory.bytes()[..30_000] == first[..30_000]);
    assert!(memory.bytes()[70_000..] == second[40_000..]);
}

#[test]
fn names_and_ranks_that_make_no_sense_are_refused() {
    let name = unique("taken");
    let _holder = Endpoint::open(&name).unwrap();
    let in_use = Error::Connect(ConnectError::NameInUse(name.clone()));
    assert_eq!(Endpoint::open(&name).unwrap_err(), in_use);
    assert_eq!(Listener::bind(&name).unwrap_err(), in_use);
    let folder = Folder::new("names");
    let path = folder.file("socket");
    let _file_holder = Endpoint::open(&path).unwrap();
    let in_use = Error::Connect(ConnectError::NameInUse(path.clone()));
    assert_eq!(Endpoint::open(&path).unwrap_err(), in_use);
    assert!(Endpoint::open(&folder.file("no such folder/socket")).is_err());
    assert!(Endpoint::open(&"long".repeat(100)).is_err());
    let error = Job::join("job", 3, 3).unwrap_err();
    assert_eq!(error, Error::Validation(ValidationError::Rank { rank: 3, size: 3 }));
    assert!(
        EndpointBuilder::new().allow_user("no such user, surely").open(&unique("user")).is_err()
    );
}

#[test]
fn connecting_to_nobody_says_so_at_once() {
    let endpoint = Endpoint::open(&unique("lonely")).unwrap();
    let folder = Folder::new("nobody");
    for name in [unique("nobody"), folder.file("nobody")] {
        let nobody = Error::Connect(ConnectError::NoListener(name.clone()));
        assert_eq!(endpoint.connect(&name).unwrap_err(), nobody);
        assert_eq!(Link::connect(&name).unwrap_err(), nobody);
    }
}

#[test]
fn somebody_who_never_answers_is_given_up() {
    use memferry_sys::seqpacket::{SeqPacketListener, SocketName};
    let name = unique("mute");
    let _mute = SeqPacketListener::bind(&SocketName::parse(&name)).unwrap();
    let timeout = std::time::Duration::from_millis(50);
    let endpoint = EndpointBuilder::new().connect_timeout(timeout).open(&unique("asking")).unwrap();
    let error = endpoint.connect(&name).unwrap_err();
    assert_eq!(error, Error::Connect(ConnectError::NoReply { name, seconds: 0 }));
}

#[test]
fn somebody_who_speaks_another_protocol_is_told_apart() {
    use memferry_sys::seqpacket::{SeqPacketListener, SocketName};
    let name = unique("stranger");
    let stranger = SeqPacketListener::bind(&SocketName::parse(&name)).unwrap();
    let endpoint = Endpoint::open(&unique("asking")).unwrap();
    let error = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| endpoint.connect(&name).unwrap_err());
        let mut socket = None;
        until("the connection arrives", || {
            socket = stranger.accept().ok();
            socket.is_some()
        });
        let socket = socket.unwrap();
        raw_peer::answer(&socket).unwrap();
        socket.send(b"good day, who are you?", &[]).unwrap();
        connecting.join().unwrap()
    });
    assert!(matches!(error, Error::Connect(ConnectError::Rejected(..))), "{error}");
}

#[test]
fn the_file_of_a_crashed_process_is_taken_over() {
    let folder = Folder::new("crashed");
    let path = folder.file("socket");
    let mut command = process::command("holder");
    let mut child = process::Child::spawn(command.env("MEMFERRY_TEST_NAME", &path));
    until("the name is taken", || std::path::Path::new(&path).exists());
    let endpoint = Endpoint::open(&unique("survivor")).unwrap();
    // It does not reply, so this only shows that a process listens.
    until("it listens", || {
        memferry_sys::seqpacket::SeqPacketSocket::connect(
            &memferry_sys::seqpacket::SocketName::parse(&path),
        )
        .is_ok()
    });
    assert!(Endpoint::open(&path).is_err());
    child.kill();
    let nobody = Error::Connect(ConnectError::NoListener(path.clone()));
    assert_eq!(endpoint.connect(&path).unwrap_err(), nobody);
    let successor = EndpointBuilder::new().background(true).open(&path).unwrap();
    endpoint.connect(&path).unwrap();
    successor.close();
    assert!(folder.contents().is_empty(), "{:?}", folder.contents());
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        let _endpoint = Endpoint::open(&process::setting("MEMFERRY_TEST_NAME")).unwrap();
        loop {
            std::thread::park();
        }
    }
}

#[test]
fn names_that_cannot_be_are_refused_with_the_reason() {
    let text = |error: Error| error.to_string();
    let endpoint = Endpoint::open(&unique("named")).unwrap();
    for error in [
        Endpoint::open("").unwrap_err(),
        Listener::bind("").unwrap_err(),
        Link::connect("").unwrap_err(),
        endpoint.connect("").unwrap_err(),
    ] {
        assert_eq!(error, Error::Validation(ValidationError::EmptyName));
    }
    let long = "x".repeat(300);
    assert!(text(Endpoint::open(&long).unwrap_err()).contains(&long));
    let nowhere = std::env::temp_dir().join("memferry-no-such-folder/x");
    let error = text(Endpoint::open(nowhere.to_str().unwrap()).unwrap_err());
    assert!(error.contains("no-such-folder") && error.contains("folder that exists"), "{error}");
    let file = std::env::temp_dir().join(unique("file"));
    std::fs::write(&file, "text").unwrap();
    let error = text(Endpoint::open(file.to_str().unwrap()).unwrap_err());
    assert!(error.contains("no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "text");
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let builder = EndpointBuilder::new().connect_timeout(std::time::Duration::from_millis(50));
    let error = builder.join(&unique("job"), 0, 2).unwrap_err().to_string();
    assert!(error.starts_with("rank 1 of the job job"), "{error}");
}

#[test]
fn an_endpoint_opens_as_if_empty_variables_were_not_set() {
    const MARK: &str = "MEMFERRY_TEST_EMPTY";
    if std::env::var_os(MARK).is_some() {
        let sides = pair(&EndpointBuilder::new());
        sides.here.send(sides.to_there, 1, b"as ever").unwrap();
        let mut text = [0; 7];
        sides.there.recv(sides.to_here, 1, TAG_ALL, &mut text).unwrap();
        assert_eq!(&text, b"as ever");
        // What has been attached is what a recording is of.
        let window = sides.here.expose(vec![7u8; 4096], Rights::READ).unwrap();
        let remote = sides.there.attach(sides.to_here, window.handle()).unwrap();
        remote.get(0, &mut text).unwrap();
        assert_eq!(text, [7; 7]);
        return;
    }
    // Where a recording without a name would be written.
    let folder = Folder::new("nameless");
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["an_endpoint_opens_as_if_empty_variables_were_not_set", "--exact"])
        .envs(EndpointBuilder::VARIABLES.map(|name| (name, "")))
        .envs([(MARK, "1"), ("MEMFERRY_PROFILE", "off"), ("MEMFERRY_GPU", "")])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
    assert_eq!(folder.contents(), Vec::<String>::new());
}
