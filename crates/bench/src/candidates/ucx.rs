//! UCX as a peer: its own `ucx_perftest`, with a server and a client started for every measurement,
//! because it cannot wait for a command.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::group::TaskRunner;
use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::cores::MemberCores;
use crate::group::process_group::REPLY_TIMEOUT;
use crate::harness::{Calibration, Sample, warm_up_iterations};
use crate::host::process::{self, die_with_parent, terminate};

const PERFTEST: &str = "ucx_perftest";

/// Starts pairs of `ucx_perftest`.
#[derive(Debug)]
pub(crate) struct Perftest {
    cores: [usize; 2],
}

/// A server that is terminated on drop.
struct PerftestServer(Child);

impl Drop for PerftestServer {
    fn drop(&mut self) {
        terminate(std::slice::from_mut(&mut self.0), false);
    }
}

impl Perftest {
    pub(crate) fn find(cores: &MemberCores) -> Result<Self, String> {
        process::find(PERFTEST).ok_or("not installed")?;
        Ok(Self { cores: [cores.of_member(0), cores.of_member(1)] })
    }

    /// Version that the library reports.
    pub(crate) fn version() -> Option<String> {
        let mut ask = Command::new("ucx_info");
        ask.arg("-v");
        let text = process::output(ask, Duration::from_secs(10)).ok()?;
        process::version_in(&text).map(str::to_owned)
    }

    fn command(&self, member: usize, port: u16) -> Command {
        let mut command = Command::new(PERFTEST);
        command.args(["-p", &port.to_string(), "-c", &self.cores[member].to_string()]);
        // Shared memory only: the comparison does not include the loopback network.
        command.env("UCX_TLS", "sm,self").env("UCX_WARN_UNUSED_ENV_VARS", "n");
        command
    }

    fn serve(&self, port: u16) -> Result<PerftestServer, String> {
        let mut command = self.command(1, port);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = die_with_parent(&mut command, 0).spawn();
        child.map(PerftestServer).map_err(|error| format!("{PERFTEST} cannot be started: {error}"))
    }
}

impl TaskRunner for Perftest {
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
        let GroupTask::Pingpong { bytes } = order.task else {
            return Err("can only play pingpong".into());
        };
        let port = free_port()?;
        let mut server = self.serve(port)?;
        let deadline = Instant::now() + REPLY_TIMEOUT;
        loop {
            let mut client = self.command(0, port);
            client.args(["127.0.0.1", "-t", "tag_lat", "-f", "-v"]);
            for (option, value) in [
                ("-s", bytes),
                ("-n", order.iterations),
                ("-w", 4 + warm_up_iterations(order.iterations)),
            ] {
                client.args([option, &value.to_string()]);
            }
            match process::output(client, deadline.saturating_duration_since(Instant::now())) {
                Ok(text) => {
                    let half_ns = overall_ns(&text).ok_or(format!("said `{}`", text.trim()))?;
                    return Ok(Sample::of_messages(half_ns * 2.0 * order.iterations as f64));
                }
                // The server may not listen yet.
                Err(reason) if Instant::now() >= deadline => return Err(reason),
                Err(reason) if !matches!(server.0.try_wait(), Ok(None)) => return Err(reason),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Estimates the iterations, because every trial would start two processes.
    fn estimate(&self, task: GroupTask, slice_ns: f64) -> Option<Calibration> {
        let GroupTask::Pingpong { bytes } = task else { return None };
        // The first messages are slow, and every run starts with a new process.
        let fewest = if bytes < 16 << 20 { 40 } else { 5 };
        Some(Calibration::for_slice(slice_ns, 2.0 * (600.0 + bytes as f64 / 5.0)).at_least(fewest))
    }
}

/// Returns a port that was free at the time of the call.
fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|error| format!("no free port: {error}"))
}

/// Overall latency in the last line of comma-separated numbers: iterations, a percentile, the
/// average of the last second, the average of all, in microseconds, then bandwidths.
fn overall_ns(text: &str) -> Option<f64> {
    let numbers = |line: &str| {
        line.split(',').map(|word| word.trim().parse().ok()).collect::<Option<Vec<f64>>>()
    };
    let last = text.lines().rev().find_map(numbers)?;
    last.get(3).map(|overall_us| overall_us * 1000.0).filter(|&ns| ns > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overall_latency_is_the_fourth_number_of_the_last_line() {
        let text = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw\n\
                    1000,0.373,0.378,0.381,20.16\n";
        assert_eq!(overall_ns(text), Some(381.0));
        assert_eq!(overall_ns("[1:error] connect() failed\n"), None);
        assert_eq!(overall_ns(""), None);
    }

    #[test]
    fn it_plays_nothing_but_pingpong() {
        let mut perftest = Perftest { cores: [0, 0] };
        let order = WorkerCommand { task: GroupTask::Alltoall { bytes: 8 }, iterations: 1 };
        assert!(perftest.run(order).is_err());
        assert_eq!(perftest.estimate(order.task, 1e6), None);
    }
}
