//! How the ranks of a job become a team for collective operations, when they call the first one.
//!
//! Rank 0 makes the team, and its invitation goes down the tree of the job. A rank that finds a neighbour in the tree
//! gone before all have joined tells its other neighbours, which pass it on: nobody waits for a rank that never comes.
//! These messages have no tag, which those of applications always have.

use std::time::{Duration, Instant};

use memferry_collective::{Error as CollectiveError, Invitation, Progress, Stop, Team};
use memferry_sys::sync::lock;

use crate::endpoint::Endpoint;
use crate::envelope::{Envelope, MatchSpec};
use crate::error::Error;
use crate::job::Job;
use crate::operation::{Operation, OwnedOperation};
use crate::segments::Segment;

/// Whether a rank is a member of the team of its job.
#[derive(Debug, Default)]
pub(crate) enum Membership {
    /// No collective operation was called.
    #[default]
    NotYet,
    Member(Box<Team>),
    /// The team did not come into being.
    Failed(Error),
}

/// The length of a message that names a rank that is gone.
const GONE_BYTES: usize = 8;
/// Added to a rank that exists, but cannot join.
const CANNOT_JOIN: u64 = 1 << 32;
/// How long a rank sleeps at most while messages may need it: doubled with each sleep, up to this.
const MAX_SLEEP: Duration = Duration::from_micros(3200);
const FIRST_SLEEP: Duration = Duration::from_micros(200);
/// How long a rank that failed to join waits for the word of another one about the cause. It comes at once, unless
/// that rank is not given a core.
const WORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes progress on the messages of an endpoint, while its rank waits in a collective operation.
struct EndpointProgress<'a> {
    endpoint: &'a Endpoint,
    /// Returns whether the application ends the operation.
    interrupt: Option<fn() -> bool>,
    sleep: Duration,
}

impl<'a> EndpointProgress<'a> {
    fn new(job: &'a Job) -> Self {
        let interrupt = job.interrupt.get().copied();
        Self { endpoint: job.endpoint(), interrupt, sleep: FIRST_SLEEP }
    }
}

impl Progress for EndpointProgress<'_> {
    fn poll(&mut self) -> Result<Duration, Stop> {
        if self.endpoint.progress() {
            self.sleep = FIRST_SLEEP;
            return Ok(Duration::ZERO);
        }
        if self.sleep == MAX_SLEEP && self.interrupt.is_some_and(|is_interrupted| is_interrupted())
        {
            return Err(Stop);
        }
        self.sleep = (2 * self.sleep).min(MAX_SLEEP);
        Ok(self.sleep)
    }
}

/// As [`EndpointProgress`], and looks for neighbours that are gone.
struct JoinProgress<'a> {
    job: &'a Job,
    messages: EndpointProgress<'a>,
    gone: Option<CollectiveError>,
}

impl Progress for JoinProgress<'_> {
    fn poll(&mut self) -> Result<Duration, Stop> {
        let sleep = self.messages.poll()?;
        self.gone = self.job.find_gone();
        if self.gone.is_some() { Err(Stop) } else { Ok(sleep) }
    }
}

impl Job {
    /// Calls an operation of the team.
    pub(crate) fn with_team<R>(
        &self,
        call: impl FnOnce(&mut Team, &mut dyn Progress) -> Result<R, CollectiveError>,
    ) -> Result<R, Error> {
        self.endpoint().port().check_fork()?;
        let mut membership = lock(&self.team);
        if let Membership::NotYet = *membership {
            *membership = match self.join_team() {
                Ok(team) => Membership::Member(Box::new(team)),
                Err(error) => Membership::Failed(error),
            };
        }
        match &mut *membership {
            Membership::Member(team) => Ok(call(team, &mut EndpointProgress::new(self))?),
            Membership::Failed(error) => Err(error.clone()),
            Membership::NotYet => Err(Error::Closed),
        }
    }

    fn join_team(&self) -> Result<Team, Error> {
        let messages = EndpointProgress::new(self);
        let mut progress = JoinProgress { job: self, messages, gone: None };
        let joined = match self.parent() {
            None => Invitation::new(self.size()).and_then(|invitation| {
                self.pass_on(invitation.bytes(), None);
                invitation.accept(&mut progress, Duration::MAX)
            }),
            Some(parent) => self.hear_invitation(parent, &mut progress).and_then(|invitation| {
                self.pass_on(&invitation, Some(parent));
                Team::join(&invitation, self.rank(), &mut progress, Duration::MAX)
            }),
        };
        joined.map_err(|error| {
            let cause = progress.gone.take().or_else(|| self.await_cause(&error));
            let error = cause.unwrap_or(error);
            let word = match error {
                CollectiveError::RankDied(rank) | CollectiveError::RankLeft(rank) => rank as u64,
                CollectiveError::RankMissing(rank) => CANNOT_JOIN | rank as u64,
                _ => CANNOT_JOIN | self.rank() as u64,
            };
            // Nobody must wait for this rank either.
            self.pass_on(&word.to_le_bytes(), None);
            error.into()
        })
    }

    /// Another rank has given up: waits for its word about the rank that is gone.
    fn await_cause(&self, error: &CollectiveError) -> Option<CollectiveError> {
        use CollectiveError::{RankDied, RankLeft, RankMissing, Stopped};
        let has_cause = match error {
            RankDied(_) | RankLeft(_) | RankMissing(_) => true,
            // The application of this rank has stopped it: nobody else knows more.
            Stopped(rank) => *rank != self.rank(),
            _ => false,
        };
        if !has_cause {
            return None;
        }
        let deadline = Instant::now() + WORD_TIMEOUT;
        while Instant::now() < deadline {
            self.endpoint().progress_timeout(FIRST_SLEEP);
            if let Some(gone) = self.find_gone() {
                return Some(gone);
            }
        }
        None
    }

    /// Sends a message to the neighbours in the tree. Those that do not take it are gone.
    fn pass_on(&self, message: &[u8], except: Option<usize>) {
        for rank in self.parent().into_iter().chain(self.children()) {
            if Some(rank) != except {
                let _ = self.endpoint().inject(self.peer(rank), Envelope::untagged(), message);
            }
        }
    }

    /// Waits for the invitation from the parent.
    fn hear_invitation(
        &self,
        parent: usize,
        progress: &mut JoinProgress<'_>,
    ) -> Result<Vec<u8>, CollectiveError> {
        loop {
            if let Some(message) = self.hear(parent, Invitation::BYTES) {
                return Ok(message);
            }
            match progress.poll() {
                Ok(sleep) if sleep.is_zero() => std::thread::yield_now(),
                Ok(sleep) => _ = self.endpoint().progress_timeout(sleep),
                Err(Stop) => return Err(CollectiveError::Stopped(self.rank())),
            }
        }
    }

    /// The error about a rank that is gone, if a neighbour is or says so.
    fn find_gone(&self) -> Option<CollectiveError> {
        self.parent().into_iter().chain(self.children()).find_map(|rank| {
            if let Some(word) = self.hear(rank, GONE_BYTES) {
                let word = word.try_into().map(u64::from_le_bytes).ok()?;
                let gone = usize::try_from(word & !CANNOT_JOIN).ok();
                let gone = gone.filter(|gone| *gone < self.size())?;
                return Some(match word & CANNOT_JOIN {
                    0 => CollectiveError::RankDied(gone),
                    _ => CollectiveError::RankMissing(gone),
                });
            }
            let state = self.endpoint().port().lock();
            let is_gone = state.protocol.peers.connection_of(self.peer(rank)).is_err();
            is_gone.then_some(CollectiveError::RankDied(rank))
        })
    }

    /// Receives a message of this length from a neighbour, if there is one.
    fn hear(&self, rank: usize, length: usize) -> Option<Vec<u8>> {
        let (port, wanted) = (self.endpoint().port(), MatchSpec::untagged(self.peer(rank)));
        let mut state = port.lock();
        let found = state.protocol.probe(&wanted).ok()??;
        if found.length != length as u64 {
            return None;
        }
        let receive = OwnedOperation::begin(vec![0u8; length], true, |buffer| {
            let target = [Segment::target(buffer.as_mut_ptr(), buffer.len())];
            // SAFETY: the operation owns the buffer and returns it only after completion.
            let begun = unsafe { state.receive(&wanted, &target, None) }?;
            Ok(Operation::new(port, begun))
        });
        drop(state);
        receive.ok()?.wait().ok().map(|(_, message)| message)
    }
}
