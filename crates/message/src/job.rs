//! Jobs: endpoints that find each other by the name of the job and a rank each.
//!
//! The ranks are a tree: rank `r` has the children `2r + 1` and `2r + 2`. A rank joins when its children have
//! joined, and tells its parent; rank 0 tells everybody that all have. So a job of `n` ranks starts with
//! `n - 1` connections. The other connections are made when the first message needs them.

use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::builder::EndpointBuilder;
use crate::endpoint::{Endpoint, TAG_ANY};
use crate::error::{ConnectError, Error, ValidationError};
use crate::job_team::Membership;
use crate::port::Peer;

/// An endpoint among `size` endpoints of a job. Two ranks are connected when the first message
/// between them needs it.
///
/// Collective operations ([`Job::barrier`], [`Job::broadcast`], [`Job::allreduce`] and so on) are called by all
/// ranks, in the same order and with the same lengths. They go through shared memory, not through messages. When
/// a rank dies, all ranks get an error that names it.
///
/// ```
/// use memferry::message::Job;
///
/// let job = Job::join("doc-alone", 0, 1)?; // one rank: it waits for nobody
/// assert_eq!((job.rank(), job.size()), (0, 1));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Job {
    endpoint: Endpoint,
    rank: usize,
    peers: Vec<Peer>,
    /// For collective operations.
    pub(crate) team: Mutex<Membership>,
    /// Asked from time to time by collective operations that wait.
    pub(crate) interrupt: OnceLock<fn() -> bool>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, size) = (&self.rank, &self.peers.len());
        let mut shown = f.debug_struct("Job");
        shown.field("rank", rank).field("size", size).field("endpoint", &self.endpoint).finish()
    }
}

impl Job {
    /// Joins a job with a rank. Returns when all ranks have joined.
    pub fn join(name: &str, rank: usize, size: usize) -> Result<Self, Error> {
        EndpointBuilder::new().join(name, rank, size)
    }

    /// Joins a job with the lowest free rank.
    pub fn join_any(name: &str, size: usize) -> Result<Self, Error> {
        EndpointBuilder::new().join_any(name, size)
    }

    /// This endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The rank of this endpoint.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of endpoints in the job.
    pub fn size(&self) -> usize {
        self.peers.len()
    }

    /// The peer of a rank, including this one.
    ///
    /// # Panics
    /// When `rank` is not below the size.
    pub fn peer(&self, rank: usize) -> Peer {
        self.peers[rank]
    }

    /// Sets a function that collective operations call while they wait for long: it ends them on all ranks by
    /// returning true. The first one stays.
    #[doc(hidden)]
    pub fn set_interrupt(&self, is_interrupted: fn() -> bool) {
        let _ = self.interrupt.set(is_interrupted);
    }

    /// The rank of a peer.
    pub fn rank_of(&self, peer: Peer) -> Option<usize> {
        // Peers are added in order of their ranks, so most have the number of their rank.
        let rank = self.peers.get(peer.index).is_some_and(|known| *known == peer);
        if rank { Some(peer.index) } else { self.peers.iter().position(|known| *known == peer) }
    }
}

fn socket_name(job: &str, rank: usize) -> String {
    // The name contains the user id, so that jobs of two users do not conflict.
    let uid = rustix::process::geteuid().as_raw();
    format!("job:{uid}:{}:{rank}", job.replace('/', "|"))
}

/// The tag of messages between a rank and its parent while the job starts. Applications may use it too: no
/// such message is left when [`Job::join`] returns.
const JOIN_TAG: u64 = 0;
/// What ranks say when all ranks below them, or all of the job, have joined. Otherwise they name the one that
/// is missing.
const NOBODY_MISSING: u64 = u64::MAX;
/// How much longer than the ranks below it a rank waits for their word, for each level of the tree: a rank that
/// waits for another one is not the missing one, if both were started within this time.
const WORD_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between attempts to connect to a parent that has not joined yet.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

impl EndpointBuilder {
    /// Joins a job with a rank, with these settings. Returns when all ranks have joined, or fails
    /// after the connect timeout.
    pub fn join(&self, name: &str, rank: usize, size: usize) -> Result<Job, Error> {
        if rank >= size {
            return Err(ValidationError::Rank { rank, size }.into());
        }
        self.join_as(self.open(&socket_name(name, rank))?, name, rank, size)
    }

    /// Joins a job with the lowest free rank.
    pub fn join_any(&self, name: &str, size: usize) -> Result<Job, Error> {
        for rank in 0..size {
            match self.open(&socket_name(name, rank)) {
                Ok(endpoint) => return self.join_as(endpoint, name, rank, size),
                Err(Error::Connect(ConnectError::NameInUse(_))) => {}
                Err(error) => return Err(error),
            }
        }
        Err(ConnectError::NameInUse(format!("{name} (all {size} ranks are taken)")).into())
    }

    fn join_as(
        &self,
        endpoint: Endpoint,
        name: &str,
        rank: usize,
        size: usize,
    ) -> Result<Job, Error> {
        let timeout = self.config()?.connect_timeout;
        let peers: Result<_, _> =
            (0..size).map(|other| endpoint.add_peer(&socket_name(name, other))).collect();
        let job = Job {
            endpoint,
            rank,
            peers: peers?,
            team: Mutex::default(),
            interrupt: OnceLock::new(),
        };
        match job.wait_for_all(name, Instant::now().checked_add(timeout))? {
            None => Ok(job),
            Some(rank) => {
                let (job, seconds) = (name.to_owned(), timeout.as_secs());
                Err(ConnectError::RankMissing { job, rank, seconds }.into())
            }
        }
    }
}

impl Job {
    /// The parent of this rank in the tree; rank 0 has none.
    pub(crate) fn parent(&self) -> Option<usize> {
        self.rank.checked_sub(1).map(|place| place / 2)
    }

    /// The children of this rank in the tree.
    pub(crate) fn children(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let size = self.size();
        [2 * self.rank + 1, 2 * self.rank + 2].into_iter().filter(move |child| *child < size)
    }

    /// Waits until all ranks have joined. Returns the rank that is missing at the deadline.
    fn wait_for_all(&self, name: &str, deadline: Option<Instant>) -> Result<Option<usize>, Error> {
        let (parent, children) = (self.parent(), self.children());
        // First of all: a parent that sees this rank does not take it for the missing one.
        let has_parent = match parent {
            Some(parent) => self.connect_to_parent(&socket_name(name, parent), parent, deadline)?,
            None => false,
        };
        let mut missing = None;
        for child in children.clone() {
            missing = missing.or(self.wait_for_child(child, deadline)?);
        }
        let limit = later(deadline, self.size().ilog2() + 1);
        if let Some(parent) = parent {
            missing = if has_parent && self.tell(parent, missing, limit)? {
                self.hear_from(parent, limit)?
            } else {
                missing.or(Some(parent))
            };
        }
        for child in children {
            // One that is gone after its word has joined: its end is found out by those who need it.
            if self.is_connected(child) {
                self.tell(child, missing, limit)?;
            }
        }
        Ok(missing)
    }

    /// Waits until a child and all ranks below it have joined.
    fn wait_for_child(
        &self,
        child: usize,
        deadline: Option<Instant>,
    ) -> Result<Option<usize>, Error> {
        let joined = self.endpoint.port().block(false, deadline, |state| {
            state.accept_pending();
            state.protocol.peers.was_connected(self.peers[child]).then_some(())
        });
        if joined.is_none() {
            return Ok(Some(child));
        }
        // The levels of the tree below the child.
        let levels = (self.size() / (child + 1)).max(1).ilog2() + 1;
        self.hear_from(child, later(deadline, levels))
    }

    /// Connects to the parent, which may not have joined yet. Returns whether it has.
    fn connect_to_parent(
        &self,
        name: &str,
        parent: usize,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        while !self.is_connected(parent) {
            match self.endpoint.connect(name) {
                Ok(_) => break,
                Err(Error::Connect(ConnectError::NoListener(_))) => {}
                Err(error) => return Err(error),
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            std::thread::sleep(CONNECT_INTERVAL);
        }
        Ok(true)
    }

    fn is_connected(&self, rank: usize) -> bool {
        self.endpoint.port().lock().protocol.peers.was_connected(self.peers[rank])
    }

    /// Tells a rank which one is missing. Returns whether it takes the message.
    fn tell(
        &self,
        rank: usize,
        missing: Option<usize>,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        let word = missing.map_or(NOBODY_MISSING, |rank| rank as u64);
        let started = self.endpoint.isend(self.peers[rank], JOIN_TAG, word.to_le_bytes().to_vec());
        let outcome = match started {
            Ok(send) => send.wait_timeout(time_left(deadline)),
            Err(failed) => Ok(Err(failed)),
        };
        match outcome {
            Ok(Ok(_)) => Ok(true),
            Ok(Err(failed)) if !matches!(failed.error, Error::PeerDisconnected(_)) => {
                Err(failed.error)
            }
            _ => Ok(false),
        }
    }

    /// Receives the word of a rank about who is missing: that rank itself if it says nothing.
    fn hear_from(&self, rank: usize, deadline: Option<Instant>) -> Result<Option<usize>, Error> {
        let started = self.endpoint.irecv(self.peers[rank], JOIN_TAG, TAG_ANY, vec![0u8; 8]);
        let outcome = match started {
            Ok(receive) => receive.wait_timeout(time_left(deadline)),
            Err(failed) => Ok(Err(failed)),
        };
        match outcome {
            Ok(Ok((status, word))) => {
                let word = <[u8; 8]>::try_from(word).map(u64::from_le_bytes).ok();
                match word.filter(|_| status.length == 8) {
                    Some(NOBODY_MISSING) => Ok(None),
                    Some(missing) if missing < self.size() as u64 => Ok(Some(missing as usize)),
                    // It is no rank of this job.
                    _ => Ok(Some(rank)),
                }
            }
            Ok(Err(failed)) => match failed.error {
                Error::PeerDisconnected(_) | Error::Truncated { .. } => Ok(Some(rank)),
                error => Err(error),
            },
            Err(_) => Ok(Some(rank)),
        }
    }
}

/// How long a wait until a deadline may take.
fn time_left(deadline: Option<Instant>) -> Duration {
    deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
}

fn later(deadline: Option<Instant>, levels: u32) -> Option<Instant> {
    deadline.and_then(|deadline| deadline.checked_add(WORD_TIMEOUT * levels))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn unique(name: &str) -> String {
        format!("{name}-{}", std::process::id())
    }

    /// Runs a function for each rank, on a thread each.
    fn run_ranks<T: Send, R: Send>(of: Vec<T>, run: impl Fn(usize, T) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let run = &run;
            let ranks = of.into_iter().enumerate();
            let started = ranks.map(|(rank, of)| scope.spawn(move || run(rank, of)));
            let started: Vec<_> = started.collect();
            started.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_are_connected_when_a_message_needs_it() {
        const SIZE: usize = 12;
        let name = unique("lazy-job");
        let jobs = run_ranks(vec![(); SIZE], |rank, ()| Job::join(&name, rank, SIZE).unwrap());
        for job in &jobs {
            assert!(job.endpoint().peers().len() <= 3, "a parent and two children");
        }
        let jobs = run_ranks(jobs, |rank, job| {
            for other in 0..SIZE {
                job.endpoint().send(job.peer(other), 5, &[rank as u8]).unwrap();
            }
            let mut seen = [false; SIZE];
            for _ in 0..SIZE {
                let receive = job.endpoint().irecv(crate::Source::Any, 5, u64::MAX, vec![0u8]);
                let got = receive.unwrap().wait_timeout(Duration::from_secs(60)).unwrap();
                let (status, byte) = got.unwrap();
                assert_eq!(job.rank_of(status.source), Some(byte[0].into()));
                assert!(!std::mem::replace(&mut seen[usize::from(byte[0])], true));
            }
            job
        });
        for job in &jobs {
            assert_eq!(job.endpoint().peers().len(), SIZE);
        }
    }

    #[test]
    fn every_rank_learns_which_one_is_missing() {
        const SIZE: usize = 9;
        const TRIES: usize = 8;
        for missing in [0, 3, 8] {
            // On a busy machine, some ranks may come too late for the others: these are then named too.
            let mut named = Vec::new();
            let is_right = (0..TRIES).any(|attempt| {
                let name = unique(&format!("job-without-{missing}-{attempt}"));
                let timeout = Duration::from_millis(300 << attempt);
                let others = (0..SIZE).filter(|rank| *rank != missing).collect();
                named = run_ranks(others, |_, rank| {
                    let builder = EndpointBuilder::new().connect_timeout(timeout);
                    match builder.join(&name, rank, SIZE).unwrap_err() {
                        Error::Connect(ConnectError::RankMissing { rank, .. }) => rank,
                        error => panic!("rank {rank}: {error}"),
                    }
                });
                named.iter().all(|rank| *rank == missing)
            });
            assert!(is_right, "{missing} is missing, and not {named:?}");
        }
    }
}
