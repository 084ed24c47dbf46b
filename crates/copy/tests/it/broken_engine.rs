//! An engine whose code panics: its transfers fail, no thread hangs, and the processor continues. And
//! one whose polls may take long: callers that must not wait leave them to the poll thread.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::common::{builder, pattern};
use memferry_copy::{Error, Ferry};
use memferry_engine::contract::{Capabilities, CopyDirection};
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{
    Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine, ExecutionError,
    OpenError, Sequence, SubmitError, Submitted,
};

/// A timeout longer than any test takes, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(200);

/// Wraps a polled engine. Stalls until it is switched to panic, in every poll from then on.
#[derive(Debug)]
struct PanickyEngine {
    inner: PolledEngine,
    panics: Arc<AtomicBool>,
    submit_panics: bool,
}

impl Engine for PanickyEngine {
    fn name(&self) -> &'static str {
        "panicky"
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        self.inner.cost(direction)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let (inner, panics) = (self.inner.open_channel(options)?, self.panics.clone());
        let submit_panics = self.submit_panics;
        Ok(Arc::new(PanickyChannel { held: Default::default(), inner, panics, submit_panics }))
    }
}

#[derive(Debug)]
struct PanickyChannel {
    /// The accepted descriptors, which are never executed.
    held: std::sync::Mutex<Vec<Descriptor>>,
    inner: Arc<dyn Channel>,
    panics: Arc<AtomicBool>,
    /// Panics in each submit, after it has accepted the descriptors.
    submit_panics: bool,
}

// SAFETY: it executes nothing, and counts nothing as complete.
unsafe impl Channel for PanickyChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let first = held.len() as u64 + 1;
        let before = held.len();
        held.extend(batch.iter_mut().filter_map(Option::take));
        if self.submit_panics {
            std::panic::resume_unwind(Box::new("an engine that panics, on purpose"));
        }
        Ok(Submitted { first, count: held.len() - before })
    }

    fn completed(&self) -> Sequence {
        0
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.inner.error_of(sequence)
    }

    fn poll(&self) -> bool {
        if self.panics.load(Ordering::SeqCst) {
            std::panic::resume_unwind(Box::new("an engine that panics, on purpose"));
        }
        false
    }

    fn park(&self, _: Sequence, _: Duration) -> bool {
        self.poll()
    }

    fn close(&self) {}

    fn outstanding_bytes(&self) -> u64 {
        self.held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .map(Descriptor::length)
            .sum()
    }

    fn statistics(&self) -> ChannelStatistics {
        self.inner.statistics()
    }
}

fn panicky() -> (Ferry, Arc<AtomicBool>) {
    panicky_in(false)
}

fn panicky_in(submit_panics: bool) -> (Ferry, Arc<AtomicBool>) {
    let panics = Arc::new(AtomicBool::new(false));
    let engine =
        PanickyEngine { inner: PolledEngine::new(), panics: panics.clone(), submit_panics };
    let builder = builder().engine(Arc::new(engine), 2).split_bytes(0).inline_bytes(0);
    (builder.build().unwrap(), panics)
}

fn is_engine_error(error: &Error) -> bool {
    matches!(error, Error::Execution(ExecutionError::Engine { .. }))
}

#[test]
fn a_panic_in_an_engine_fails_what_is_pending_and_leaves_the_rest_to_the_processor() {
    let (ferry, panics) = panicky();
    let transfers: Vec<_> = [100usize, 4096, 50_000]
        .map(|length| ferry.icopy(pattern(length, 1), vec![0u8; length]).unwrap())
        .into();
    let polled = ferry.icopy(pattern(3000, 1), vec![0u8; 3000]).unwrap();
    let signalled = ferry.icopy(pattern(3000, 1), vec![0u8; 3000]).unwrap();
    let event = signalled.transfer().event().unwrap();
    let mut polled = pin!(polled);
    let mut context = Context::from_waker(Waker::noop());
    assert!(polled.as_mut().poll(&mut context).is_pending());
    panics.store(true, Ordering::SeqCst);

    for transfer in transfers {
        let outcome = transfer.transfer().wait_timeout(TIMEOUT).expect("it ends");
        assert!(is_engine_error(&outcome.unwrap_err()));
        assert!(is_engine_error(&transfer.wait().unwrap_err().error));
    }
    let deadline = Instant::now() + TIMEOUT;
    let failed = loop {
        assert!(Instant::now() < deadline, "the future does not end");
        match polled.as_mut().poll(&mut context) {
            Poll::Ready(outcome) => break outcome.unwrap_err(),
            Poll::Pending => std::thread::yield_now(),
        }
    };
    assert!(is_engine_error(&failed.error), "{failed}");
    while event.drain() == 0 {
        assert!(Instant::now() < deadline, "the event does not come");
        std::thread::yield_now();
    }

    // Other channels of the engine panic in turn, each at its first poll; then none is used.
    for round in 0..20 {
        let source = pattern(10_000, round);
        match ferry.icopy(source.clone(), vec![0u8; 10_000]).unwrap().wait() {
            Ok((_, target)) => assert!(target == source),
            Err(failed) => assert!(round < 2 && is_engine_error(&failed.error), "{failed}"),
        }
    }
    let (source, mut target) = (pattern(100_000, 7), vec![0; 100_000]);
    ferry.copy(&source, &mut target).unwrap();
    assert!(source == target);
    drop(ferry);
}

#[test]
fn a_ferry_whose_engine_panicked_can_be_dropped() {
    let (ferry, panics) = panicky();
    let transfer = ferry.icopy(pattern(5000, 1), vec![0u8; 5000]).unwrap();
    panics.store(true, Ordering::SeqCst);
    drop(ferry);
    let outcome = transfer.transfer().wait_timeout(TIMEOUT).expect("it ends");
    assert!(is_engine_error(&outcome.unwrap_err()));
}

#[test]
fn a_copy_that_an_engine_took_before_its_submit_panicked_fails_and_does_not_count_as_done() {
    let (ferry, _) = panicky_in(true);
    for round in 0..6 {
        let source = pattern(50_000, round);
        let transfer = ferry.icopy(source.clone(), vec![0u8; 50_000]).unwrap();
        let ended = transfer.transfer().wait_timeout(TIMEOUT).expect("it ends");
        match transfer.wait() {
            Ok((_, target)) => assert!(ended.is_ok() && target == source, "round {round}"),
            Err(failed) => assert!(ended.is_err() && is_engine_error(&failed.error), "{failed}"),
        }
    }
}

/// Wraps a polled engine. Only a whole poll executes anything, and the names of the threads that poll
/// are recorded.
#[derive(Debug)]
struct SlowEngine {
    inner: PolledEngine,
    pollers: Arc<std::sync::Mutex<Vec<String>>>,
}

impl Engine for SlowEngine {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        self.inner.cost(direction)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let (inner, pollers) = (self.inner.open_channel(options)?, self.pollers.clone());
        Ok(Arc::new(SlowChannel { inner, pollers }))
    }
}

#[derive(Debug)]
struct SlowChannel {
    inner: Arc<dyn Channel>,
    pollers: Arc<std::sync::Mutex<Vec<String>>>,
}

// SAFETY: everything is the inner channel's.
unsafe impl Channel for SlowChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        self.inner.submit(batch)
    }

    fn completed(&self) -> Sequence {
        self.inner.completed()
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.inner.error_of(sequence)
    }

    fn poll(&self) -> bool {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.pollers.lock().unwrap().push(name);
        self.inner.poll()
    }

    fn poll_briefly(&self) -> bool {
        false
    }

    fn close(&self) {
        self.inner.close();
    }

    fn outstanding_bytes(&self) -> u64 {
        self.inner.outstanding_bytes()
    }

    fn statistics(&self) -> ChannelStatistics {
        self.inner.statistics()
    }
}

#[test]
fn callers_that_must_not_wait_leave_long_polls_to_the_poll_thread() {
    let pollers = Arc::<std::sync::Mutex<Vec<String>>>::default();
    let engine = SlowEngine { inner: PolledEngine::new(), pollers: pollers.clone() };
    let builder = builder().engine(Arc::new(engine), 1).split_bytes(0).inline_bytes(0);
    let ferry = builder.build().unwrap();
    let transfer = ferry.icopy(pattern(50_000, 1), vec![0u8; 50_000]).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !transfer.transfer().is_done() {
        assert!(Instant::now() < deadline, "the poll thread does not poll");
        let _ = transfer.transfer().check();
        let _ = transfer.transfer().wait_timeout(Duration::from_micros(100));
    }
    let (_, target) = transfer.wait().unwrap();
    assert_eq!(target, pattern(50_000, 1));
    drop(ferry);
    let pollers = pollers.lock().unwrap();
    assert!(pollers.iter().all(|name| name == "memferry-driver"), "{pollers:?}");
}
