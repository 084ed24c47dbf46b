//! Registered memory, while peers access it and while endpoints are opened and closed.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use memferry_fi::abi::*;

use crate::provider::world::*;

const KEY: u64 = 0xfeed;
const BYTES: usize = 64 << 20;
/// The environment variable with the address of the owner, for the process that accesses its
/// memory.
const OWNER: &str = "MEMFERRY_TEST_OWNER";

/// Registers memory that peers may access.
fn register(world: &World, at: *mut u8, length: usize, key: u64) -> Result<*mut FidMr, c_int> {
    let mut mr = null_mut();
    // SAFETY: the domain is open, and `mr` has space for a pointer; the tests keep the memory.
    let code = unsafe {
        let reg = (*(*world.domain).mr).reg;
        let access = FI_REMOTE_READ | FI_REMOTE_WRITE;
        reg(world.domain.cast(), at.cast(), length, access, 0, key, 0, &raw mut mr, null_mut())
    };
    if code == 0 { Ok(mr) } else { Err(code) }
}

fn offers_accesses(world: &World) -> bool {
    let offers = world.offer.see(|parts| parts.info.caps & FI_RMA != 0);
    if !offers {
        let why = "the provider offers no accesses to memory: `memferry doctor` says why";
        memferry_testing::skip(memferry_testing::Requirement::CrossMemory, why);
    }
    offers
}

/// The process that writes to the memory of another without end; it is not a test of its own.
#[test]
fn visitor() {
    let Ok(owner) = std::env::var(OWNER) else { return };
    let world = World::new();
    let side = world.side();
    let mut name = [0; 64];
    for (index, byte) in name.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&owner[2 * index..2 * index + 2], 16).unwrap();
    }
    assert_eq!(side.insert(&name), 0);
    let bytes = vec![1u8; BYTES];
    let end = Instant::now() + Duration::from_secs(600);
    while Instant::now() < end {
        // SAFETY: the endpoint is open, and the memory is kept.
        let code = unsafe {
            let write = (*(*side.ep).rma).write;
            write(side.ep, bytes.as_ptr().cast(), BYTES, null_mut(), 0, 0, KEY, context(1))
        };
        // The key may be missing temporarily, and the owner may have exited.
        while code == 0 && side.try_read().err() == Some(-FI_EAGAIN) {}
        let _ = take_error(side.queue);
    }
}

struct AccessorProcess(std::process::Child);

impl AccessorProcess {
    fn of(owner: &Side) -> Self {
        let name: String = owner.name().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "provider::memory::visitor", "--nocapture"]).env(OWNER, name);
        Self(command.stdout(std::process::Stdio::null()).spawn().unwrap())
    }

    fn signal(&self, signal: c_int) {
        // SAFETY: the call has no preconditions; the process is a child that was not waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as libc::pid_t, signal) }, 0);
    }

    /// Stops the process, most likely in the middle of an access.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: `status` has space for a status.
        unsafe { libc::waitpid(self.0.id() as libc::pid_t, &raw mut status, libc::WUNTRACED) };
    }
}

impl Drop for AccessorProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a peer has written.
fn wait_for_writes(memory: &mut [u8], side: &Side) {
    let end = Instant::now() + Duration::from_secs(200);
    memory.fill(0);
    // SAFETY: the byte is valid; peers write to it, so each poll reads it again.
    while unsafe { memory.as_ptr().read_volatile() } == 0 {
        assert!(Instant::now() < end, "it writes");
        assert!(side.try_read().is_err());
    }
}

#[test]
fn memory_stays_registered_while_a_peer_is_in_the_middle_of_an_access() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let side = world.side();
    let mut memory = vec![0u8; BYTES];
    let visitor = AccessorProcess::of(&side);
    let mut was_busy = false;
    for _ in 0..50 {
        let mr = register(&world, memory.as_mut_ptr(), BYTES, KEY).unwrap();
        wait_for_writes(&mut memory, &side);
        visitor.stop();
        let code = close(mr.cast());
        was_busy = code == -FI_EBUSY;
        if was_busy {
            let other = register(&world, memory.as_mut_ptr(), BYTES, KEY);
            assert_eq!(other, Err(-FI_ENOKEY), "the key is still taken");
            assert_eq!(close(side.ep.cast()), -FI_EBUSY);
        }
        visitor.signal(libc::SIGCONT);
        while was_busy && close(mr.cast()) == -FI_EBUSY {}
        let as_left = memory.clone();
        assert!(side.try_read().is_err());
        assert!(memory == as_left, "nobody writes any more");
        if was_busy {
            break;
        }
        assert_eq!(code, 0);
    }
    assert!(was_busy, "it was never stopped in the middle");
}

#[test]
fn an_endpoint_that_could_not_be_enabled_holds_on_to_nothing() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    // No endpoint can expose memory at a null address.
    let mr = register(&world, null_mut(), 100, KEY).unwrap();
    let (ep, vector) = (world.endpoint(), world.vector(0));
    let queue = world.queue(FI_CQ_FORMAT_TAGGED, FI_WAIT_NONE);
    assert_eq!(bind(ep.cast(), vector.cast(), 0), 0);
    assert_eq!(bind(ep.cast(), queue.cast(), FI_SEND | FI_RECV), 0);
    assert_eq!(control(ep.cast(), FI_ENABLE, &mut 0u64), -FI_EINVAL);
    for fid in [ep.cast(), queue.cast(), vector.cast(), mr.cast()] {
        assert_eq!(close(fid), 0);
    }
}
