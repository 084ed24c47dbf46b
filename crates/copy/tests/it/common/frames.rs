//! An engine that copies between page frames, as a device does: it accesses the frames that were
//! pinned, whatever is mapped at their addresses now. And threads on which no memory can be
//! monitored.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_engine::contract::{Capabilities, CopyDirection, Pinner};
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_engine::{
    Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine, ExecutionError,
    OpenError, Sequence, SubmitError, Submitted,
};

use memferry_testing::RingPinner;

/// Copies through a file, from and to the frames that were pinned.
#[derive(Debug)]
pub(crate) struct FrameEngine {
    capabilities: Capabilities,
    ring: Arc<RingPinner>,
    file: Arc<Mutex<File>>,
}

impl FrameEngine {
    pub(crate) fn new(ring: RingPinner, file: File) -> Self {
        let like = PolledEngine::pinned_by(Arc::new(AuditingPinner::new()));
        let capabilities = like.capabilities().clone();
        Self { capabilities, ring: Arc::new(ring), file: Arc::new(Mutex::new(file)) }
    }
}

impl Engine for FrameEngine {
    fn name(&self) -> &str {
        "frames"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        PolledEngine::new().cost(direction)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.ring.clone())
    }

    fn open_channel(&self, _options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let (ring, file) = (self.ring.clone(), self.file.clone());
        Ok(Arc::new(FrameChannel { ring, file, done: AtomicU64::new(0) }))
    }
}

#[derive(Debug)]
struct FrameChannel {
    ring: Arc<RingPinner>,
    file: Arc<Mutex<File>>,
    done: AtomicU64,
}

// SAFETY: a descriptor is executed and reported before its sequence is returned.
unsafe impl Channel for FrameChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let (first, mut count) = (self.done.load(Ordering::Relaxed) + 1, 0);
        for descriptor in batch.iter_mut().filter_map(Option::take) {
            let source = descriptor.pinned_source().expect("the source is pinned").token;
            let target = descriptor.pinned_target().expect("the target is pinned").token;
            let (from, to) = (descriptor.source() as usize, descriptor.target() as usize);
            let length = descriptor.length() as usize;
            {
                let file = self.file.lock().unwrap();
                self.ring.copy_out(source, from, length, &file);
                self.ring.copy_in(target, to, length, &file);
            }
            descriptor.finish(Ok(None));
            self.done.fetch_add(1, Ordering::Release);
            count += 1;
        }
        Ok(Submitted { first, count })
    }

    fn completed(&self) -> Sequence {
        self.done.load(Ordering::Acquire)
    }

    fn error_of(&self, _sequence: Sequence) -> Option<ExecutionError> {
        None
    }

    fn close(&self) {}

    fn outstanding_bytes(&self) -> u64 {
        0
    }

    fn statistics(&self) -> ChannelStatistics {
        let submitted = self.completed();
        ChannelStatistics { submitted, completed: submitted, ..ChannelStatistics::default() }
    }
}

/// Runs `work` on a thread that may not use userfaultfd, as under kernels before 5.18 and under many
/// container runtimes. Threads that it starts may not either.
pub(crate) fn unwatched<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let denied = scope.spawn(|| {
            deny_userfaultfd();
            work()
        });
        denied.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Makes the kernel refuse userfaultfd to the calling thread from now on.
fn deny_userfaultfd() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        // The number of the system call is the first word.
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 1, libc::SYS_userfaultfd as u32),
        step(RETURN, 0, 0, REFUSE),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls change the calling thread only; the filter lives until they return.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}
