//! Jobs: endpoints that connect to each other by the name of the job and a rank each.

use std::time::{Duration, Instant};

use crate::builder::EndpointBuilder;
use crate::endpoint::Endpoint;
use crate::error::{ConnectError, Error, ValidationError};
use crate::port::Peer;

/// An endpoint among `size` endpoints of a job, all connected to each other.
///
/// ```
/// use memferry::message::Job;
///
/// let job = Job::join("doc-alone", 0, 1)?; // one rank: connected at once
/// assert_eq!((job.rank(), job.size()), (0, 1));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Job {
    endpoint: Endpoint,
    rank: usize,
    peers: Vec<Peer>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, size) = (&self.rank, &self.peers.len());
        let mut shown = f.debug_struct("Job");
        shown.field("rank", rank).field("size", size).field("endpoint", &self.endpoint).finish()
    }
}

impl Job {
    /// Joins a job with a rank. Returns when all ranks have joined and are connected.
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

    /// The rank of a peer.
    pub fn rank_of(&self, peer: Peer) -> Option<usize> {
        self.peers.iter().position(|known| *known == peer)
    }
}

fn socket_name(job: &str, rank: usize) -> String {
    // The name contains the user id, so that jobs of two users do not conflict.
    let uid = rustix::process::geteuid().as_raw();
    format!("job:{uid}:{}:{rank}", job.replace('/', "|"))
}

impl EndpointBuilder {
    /// Joins a job with a rank, with these settings. Returns when all ranks are connected, or fails
    /// after the connect timeout.
    pub fn join(&self, name: &str, rank: usize, size: usize) -> Result<Job, Error> {
        if rank >= size {
            return Err(ValidationError::Rank { rank, size }.into());
        }
        self.connect_all(self.open(&socket_name(name, rank))?, name, rank, size)
    }

    /// Joins a job with the lowest free rank.
    pub fn join_any(&self, name: &str, size: usize) -> Result<Job, Error> {
        for rank in 0..size {
            match self.open(&socket_name(name, rank)) {
                Ok(endpoint) => return self.connect_all(endpoint, name, rank, size),
                Err(Error::Connect(ConnectError::NameInUse(_))) => {}
                Err(error) => return Err(error),
            }
        }
        Err(ConnectError::NameInUse(format!("{name} (all {size} ranks are taken)")).into())
    }

    /// Connects to all lower ranks, and waits for the higher ones to connect.
    fn connect_all(
        &self,
        endpoint: Endpoint,
        name: &str,
        rank: usize,
        size: usize,
    ) -> Result<Job, Error> {
        let timeout = self.config()?.connect_timeout;
        let deadline = Instant::now().checked_add(timeout);
        let mut peers = Vec::with_capacity(size);
        for other in 0..size {
            let other_name = socket_name(name, other);
            let peer = if other == rank {
                endpoint.self_peer()?
            } else {
                let found = wait_for(&endpoint, &other_name, other < rank, deadline)?;
                let seconds = timeout.as_secs();
                let missing =
                    || ConnectError::RankMissing { job: name.to_owned(), rank: other, seconds };
                found.ok_or_else(missing)?
            };
            peers.push(peer);
        }
        Ok(Job { endpoint, rank, peers })
    }
}

/// Connects to a rank, or waits until the rank has connected. Returns `None` at the deadline.
fn wait_for(
    endpoint: &Endpoint,
    name: &str,
    dial: bool,
    deadline: Option<Instant>,
) -> Result<Option<Peer>, Error> {
    const JOIN_POLL_TIMEOUT: Duration = Duration::from_millis(1);
    loop {
        let attempt = if dial { endpoint.connect(name).map(Some) } else { Ok(None) };
        match attempt {
            Ok(Some(peer)) => return Ok(Some(peer)),
            Ok(None) | Err(Error::Connect(ConnectError::NoListener(_))) => {}
            Err(error) => return Err(error),
        }
        let mut state = endpoint.port().lock();
        state.accept_pending();
        state.progress();
        // The rank may have connected and disconnected already: its messages can still be received.
        if let Some(peer) = state.protocol.peers.find_name_or_last(name) {
            return Ok(Some(peer));
        }
        drop(state);
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
        std::thread::sleep(JOIN_POLL_TIMEOUT);
    }
}
