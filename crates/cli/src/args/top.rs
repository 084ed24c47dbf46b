//! The arguments of `memferry top`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// Arguments of `memferry top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Show one process with its channels, peers and caches
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Print one table and exit: rates over one interval
    #[arg(long)]
    pub(crate) once: bool,
    /// Print one JSON object for each interval, on a line each; with --once one, indented
    #[arg(long, conflicts_with_all = ["metrics", "listen"])]
    pub(crate) json: bool,
    /// Print all counters as OpenMetrics text and exit, for a scraper that reads files
    #[arg(long, conflicts_with = "listen")]
    pub(crate) metrics: bool,
    /// Serve the OpenMetrics text over HTTP on this address of the loopback interface, such as 127.0.0.1:9464
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub(crate) listen: Option<SocketAddr>,
    /// The time between two updates in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub(crate) interval: Duration,
    /// The column to sort by
    #[arg(long, value_enum, default_value = "copy-bytes")]
    pub(crate) sort: SortKey,
}

/// A column to sort by, the largest value first; processes and names in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// The number of the process
    Pid,
    /// The name of the program
    Name,
    /// Copies per second
    Copies,
    /// Bytes copied per second
    CopyBytes,
    /// Messages per second
    Messages,
    /// Bytes of messages per second
    MessageBytes,
    /// The slowest of a hundred copies and messages that are timed
    Latency,
    /// Descriptors in queues
    Depth,
    /// Waits per second
    Waits,
    /// Copies and messages that had to take another way
    Fallbacks,
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text
        .parse()
        .map_err(|_| format!("`{text}` is no address with a port, such as 127.0.0.1:9464"))?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(format!(
            "{} is not an address of the loopback interface: use 127.0.0.1 or [::1], and a scraper on this host",
            address.ip()
        )),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    match (0.05..=3600.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("name a time from 0.05 to 3600 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_loopback_interface_is_listened_on() {
        assert!(loopback("127.0.0.1:9464").is_ok() && loopback("[::1]:0").is_ok());
        for refused in ["0.0.0.0:9464", "192.168.1.2:80", "[::]:80", "9464", "localhost"] {
            assert!(loopback(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn an_interval_is_some_time() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for refused in ["0", "-1", "nan", "inf", "1e9", "soon"] {
            assert!(interval(refused).is_err(), "{refused}");
        }
    }
}
