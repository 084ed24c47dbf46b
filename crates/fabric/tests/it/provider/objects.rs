//! Objects are opened and closed in order, addresses are stored, and memory is registered.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use memferry_fi::abi::*;

use crate::provider::world::*;

#[test]
fn objects_in_use_cannot_be_closed() {
    let world = World::new();
    let side = world.side();
    for fid in [side.queue.cast(), side.vector.cast(), world.domain.cast(), world.fabric.cast()] {
        assert_eq!(close(fid), -FI_EBUSY);
    }
}

#[test]
fn an_endpoint_needs_a_vector_and_queues() {
    let world = World::new();
    let (ep, vector) = (world.endpoint(), world.vector(0));
    let queue = world.queue(FI_CQ_FORMAT_TAGGED, FI_WAIT_NONE);
    let side = Side { ep, queue, vector, more: Vec::new() };
    assert_eq!(side.tsend(b"early", 0, 1, 1), -(FI_EOPBADSTATE as isize));
    assert_eq!(control(ep.cast(), FI_ENABLE, &mut 0u64), -FI_ENOAV);
    assert_eq!(bind(ep.cast(), vector.cast(), 0), 0);
    assert_eq!(control(ep.cast(), FI_ENABLE, &mut 0u64), -FI_ENOCQ);
    assert_eq!(bind(ep.cast(), queue.cast(), FI_SEND | FI_RECV | FI_PEEK), -FI_EBADFLAGS);
    assert_eq!(bind(ep.cast(), queue.cast(), FI_SEND | FI_RECV), 0);
    side.enable();
    assert_eq!(bind(ep.cast(), queue.cast(), FI_SEND), -FI_EOPBADSTATE);
}

#[test]
fn names_have_one_length_and_say_how_long_they_are() {
    let world = World::new();
    let side = world.side();
    let (mut name, mut length) = ([0u8; 64], 10);
    // SAFETY: the endpoint is open; the length is at most that of the memory.
    unsafe {
        let ops = &*(*side.ep).cm;
        let at: *mut c_void = name.as_mut_ptr().cast();
        assert_eq!((ops.getname)(side.ep.cast(), at, &raw mut length), -FI_ETOOSMALL);
        assert_eq!(length, 64);
        assert_eq!((ops.getname)(side.ep.cast(), null_mut(), &raw mut length), -FI_ETOOSMALL);
        assert_eq!((ops.getname)(side.ep.cast(), at, &raw mut length), 0);
        assert_eq!((ops.setname)(side.ep.cast(), at, 64), -FI_EBUSY);
    }
}

#[test]
fn an_endpoint_can_be_given_a_name_before_it_is_enabled() {
    let world = World::new();
    let (other, ep) = (world.side(), world.endpoint());
    let mut name = other.name();
    // SAFETY: the endpoint is open; the address is as long as the call states.
    let rename =
        |name: &mut Name| unsafe { ((*(*ep).cm).setname)(ep.cast(), name.as_mut_ptr().cast(), 64) };
    assert_eq!(rename(&mut name), -FI_EADDRINUSE);
    name[5] ^= 0xff;
    assert_eq!(rename(&mut name), 0);
    let (queue, vector) = (null_mut(), null_mut());
    let side = std::mem::ManuallyDrop::new(Side { ep, queue, vector, more: Vec::new() });
    assert_eq!(side.name(), name);
    name[0] ^= 1;
    assert_eq!(rename(&mut name), -FI_EINVAL);
    assert_eq!(close(ep.cast()), 0);
}

#[test]
fn addresses_are_looked_up_removed_and_inserted_again() {
    let world = World::new();
    let (one, two) = world.pair();
    let (mut found, mut length) = ([0u8; 64], 64);
    // SAFETY: the vector is open; the lengths are those of the memory.
    unsafe {
        let ops = &*(*one.vector).ops;
        let at: *mut c_void = found.as_mut_ptr().cast();
        assert_eq!((ops.lookup)(one.vector, 0, at, &raw mut length), 0);
        assert_eq!((found, length), (two.name(), 64));
        let mut text = [0; 100];
        let mut room = 100;
        let said = (ops.straddr)(one.vector, at, text.as_mut_ptr(), &raw mut room);
        let said = CStr::from_ptr(said).to_str().unwrap();
        assert!(said.starts_with("fi_memferry://here/") && room == said.len() + 1, "{said}");
        let mut number = 0;
        assert_eq!((ops.remove)(one.vector, &raw mut number, 1, 0), 0);
        assert_eq!((ops.lookup)(one.vector, 0, at, &raw mut length), -FI_EINVAL);
        assert_eq!((ops.remove)(one.vector, &raw mut number, 1, 0), -FI_ENOENT);
    }
    let again = one.insert(&two.name());
    let mut buffer = [0; 5];
    assert_eq!((two.trecv(&mut buffer, 1, 0, 1), one.tsend(b"again", again, 1, 1)), (0, 0));
    assert_eq!((two.read_from().1, &buffer), (0, b"again"));
    one.read();
}

#[test]
fn what_waits_for_a_peer_that_is_removed_ends() {
    let world = World::new();
    let one = world.side();
    let mut name = one.name();
    name[5] ^= 0xff;
    // No endpoint has the address, so both operations wait.
    let absent = one.insert(&name);
    let mut buffer = [0; 5];
    assert_eq!(one.trecv_from(&mut buffer, absent, 1, 0, 8), 0);
    let remove = |number: &mut u64| {
        // SAFETY: the vector is open; there is one number.
        unsafe { ((*(*one.vector).ops).remove)(one.vector, &raw mut *number, 1, 0) }
    };
    assert_eq!(remove(&mut { absent }), 0);
    let error = one.read_error();
    assert_eq!((error.op_context, error.err), (context(8), FI_ECONNRESET));
    assert_eq!(one.tsend(b"never", absent, 1, 7), -(FI_EINVAL as isize));
    assert_eq!(one.trecv_from(&mut buffer, absent, 1, 0, 8), -(FI_EINVAL as isize));
}

#[test]
fn a_peer_that_two_threads_look_for_at_once_is_forgotten_when_it_is_removed() {
    /// A side that several threads use: the provider permits concurrent calls.
    struct SharedSide<'a>(&'a Side);
    // SAFETY: only the endpoint is used, which is thread-safe.
    unsafe impl Sync for SharedSide<'_> {}
    let world = World::new();
    // The other endpoint makes no progress, so that no connection is established.
    let (one, two) = (world.side(), world.side());
    let (name, shared) = (two.name(), SharedSide(&one));
    for round in 0..200 {
        let mut number = one.insert(&name);
        let mut buffers = [[0; 5]; 2];
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (at, buffer) in buffers.iter_mut().enumerate() {
                let (shared, both) = (&shared, &both);
                scope.spawn(move || {
                    both.wait();
                    assert_eq!(shared.0.trecv_from(buffer, number, 1, 0, at), 0);
                });
            }
        });
        // SAFETY: the vector is open; there is one number.
        let removed = unsafe { ((*(*one.vector).ops).remove)(one.vector, &raw mut number, 1, 0) };
        assert_eq!(removed, 0);
        // No other address refers to the peer, so the operations that wait for it fail.
        for _ in 0..2 {
            assert_eq!(one.read_error().err, FI_ECONNRESET, "round {round}");
        }
    }
}

#[test]
fn bytes_that_are_no_address_are_not_inserted() {
    let world = World::new();
    let (one, two) = world.pair();
    let addresses = [two.name(), [0; 64], two.name()];
    let (mut numbers, mut codes) = ([7u64; 3], [9 as c_int; 3]);
    // SAFETY: the vector is open; there are three addresses and three numbers.
    let inserted = unsafe {
        let insert = (*(*one.vector).ops).insert;
        let (from, to) = (addresses.as_ptr().cast(), numbers.as_mut_ptr());
        insert(one.vector, from, 3, to, FI_SYNC_ERR, codes.as_mut_ptr().cast())
    };
    assert_eq!((inserted, numbers), (2, [1, FI_ADDR_NOTAVAIL, 2]));
    assert_eq!(codes, [0, FI_EINVAL, 0]);
}

#[test]
fn insertions_are_told_to_an_event_queue() {
    let world = World::new();
    let (side, vector) = (world.side(), world.vector(FI_COMPLETION));
    let (name, mut eq) = (side.name(), null_mut());
    // SAFETY: zero is a valid value of all fields.
    let mut attr: EqAttr = unsafe { std::mem::zeroed() };
    let (mut number, mut event, mut entry) = (9, 9, [0u64; 3]);
    // SAFETY: all objects are open; there is one address, and the buffers have space for the results.
    unsafe {
        let eq_open = (*(*world.fabric).ops).eq_open;
        assert_eq!(eq_open(world.fabric, &raw mut attr, &raw mut eq, null_mut()), 0);
        let insert = (*(*vector).ops).insert;
        let (from, to) = (name.as_ptr().cast(), &raw mut number);
        assert_eq!(insert(vector, from, 1, to, 0, context(5)), -FI_ENOEQ);
        assert_eq!(bind(vector.cast(), eq.cast(), 0), 0);
        assert_eq!(insert(vector, from, 1, to, 0, context(5)), 0);
        let read = (*(*eq).ops).read;
        assert_eq!(read(eq, &raw mut event, entry.as_mut_ptr().cast(), 24, 0), 24);
    }
    assert_eq!((event, entry, number), (FI_AV_COMPLETE, [vector as u64, 5, 1], 0));
    assert_eq!((close(vector.cast()), close(eq.cast())), (0, 0));
}

#[test]
fn options_are_read_and_set() {
    let world = World::new();
    let side = world.side();
    let (mut value, mut length) = (0usize, size_of::<usize>());
    // SAFETY: the endpoint is open; the options are sizes.
    unsafe {
        let ops = &*(*side.ep).ops;
        let (fid, name): (*mut Fid, _) = (side.ep.cast(), FI_OPT_MIN_MULTI_RECV);
        let at: *mut c_void = (&raw mut value).cast();
        assert_eq!((ops.getopt)(fid, FI_OPT_ENDPOINT, name, at, &raw mut length), 0);
        value += 100;
        let wanted = value;
        assert_eq!((ops.setopt)(fid, FI_OPT_ENDPOINT, name, at, length), 0);
        value = 0;
        assert_eq!((ops.getopt)(fid, FI_OPT_ENDPOINT, name, at, &raw mut length), 0);
        assert_eq!(value, wanted);
        assert_eq!((ops.setopt)(fid, FI_OPT_ENDPOINT, name, at, 3), -FI_EINVAL);
        assert_eq!((ops.setopt)(fid, FI_OPT_ENDPOINT, 999, at, length), -FI_ENOPROTOOPT);
        assert_eq!((ops.setopt)(fid, 5, name, at, length), -FI_ENOPROTOOPT);
        assert!((ops.tx_size_left)(side.ep) > 0 && (ops.rx_size_left)(side.ep) > 0);
    }
}

#[test]
fn registered_memory_has_the_key_that_was_asked_for_once() {
    let world = World::new();
    let (fid, mut memory): (*mut Fid, _) = (world.domain.cast(), [0u8; 100]);
    let register = |key: u64| {
        let mut mr = null_mut();
        // SAFETY: the domain is open, and there is space for a pointer.
        let code = unsafe {
            let reg = (*(*world.domain).mr).reg;
            let at = memory.as_ptr().cast();
            reg(fid, at, 100, FI_SEND | FI_RECV, 0, key, 0, &raw mut mr, context(3))
        };
        (code, mr)
    };
    let (code, one) = register(0xc0de);
    assert_eq!((code, register(0xc0de).0), (0, -FI_ENOKEY));
    // SAFETY: the memory region is open.
    unsafe {
        assert_eq!(((*one).key, (*one).fid.context), (0xc0de, context(3)));
        assert!(!(*one).mem_desc.is_null());
    }
    assert_eq!(close(world.domain.cast()), -FI_EBUSY);
    assert_eq!(close(one.cast()), 0);
    let iov = [vector(&mut memory); 17];
    let mut mr = null_mut();
    let mut regv = |count| {
        // SAFETY: the domain is open, there are more vectors than the call names, and space for a pointer.
        unsafe {
            let regv = (*(*world.domain).mr).regv;
            regv(fid, iov.as_ptr(), count, FI_SEND, 0, 0xc0de, 0, &raw mut mr, null_mut())
        }
    };
    assert_eq!((regv(0), regv(17), regv(1)), (-FI_EINVAL, -FI_EINVAL, 0));
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn what_is_not_offered_says_so() {
    let world = World::new();
    let side = world.side();
    // SAFETY: these functions read no arguments.
    unsafe {
        assert_eq!(((*(*side.ep).collective).barrier)(), -(FI_ENOSYS as isize));
        assert_eq!((*(*side.ep).rma).size, size_of::<OpsRma>());
        assert_eq!((*(*side.ep).atomic).size, size_of::<OpsAtomic>());
        assert_eq!((*(*side.ep).collective).size, size_of::<OpsCollective>());
        assert_eq!(((*(*world.fabric).ops).passive_ep)(), -(FI_ENOSYS as isize));
    }
}

#[test]
fn aliases_that_are_closed_at_once_leave_nothing_behind() {
    let world = World::new();
    for _ in 0..50 {
        let side = world.side();
        let mut alias: *mut Fid = null_mut();
        let mut wanted = Alias { fid: &raw mut alias, flags: FI_TRANSMIT };
        assert_eq!(control(side.ep.cast(), FI_ALIAS, &mut wanted), 0);
        let alias = alias as usize;
        let other = std::thread::spawn(move || close(alias as *mut Fid));
        let Side { ep, queue, vector, .. } = *std::mem::ManuallyDrop::new(side);
        assert_eq!(close(ep.cast()), 0);
        assert_eq!(other.join().unwrap(), 0);
        assert_eq!((close(queue.cast()), close(vector.cast())), (0, 0));
    }
}
