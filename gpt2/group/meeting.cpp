// A file of a rendezvous holds where rank 0 listens and a word that it has drawn: one that an earlier run left leads to nobody who knows that word.
#include "gpt2/group/meeting.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "fattn/fattn.h"
#include "files/input_file.h"
#include "files/printable.h"
#include "files/whole_file.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

using Clock = std::chrono::steady_clock;
using files::printable;

constexpr auto kRetry = std::chrono::milliseconds(50);
constexpr auto kHello = std::chrono::seconds(10);  // that whoever connects may take to say who it is
constexpr size_t kMostFile = 4096;

struct Place {
  std::string host;
  int port = 0;
  std::string word = "-";
};

std::string place_text(const Place& place) { return "'" + printable(place.host, 200) + "', port " + std::to_string(place.port); }
std::string seconds_text(double seconds) { return std::to_string(static_cast<int64_t>(seconds)) + " s"; }

struct Hello {
  int rank = 0, ranks = 0;
  std::string word, version;
};

std::string text_of(const Launch& launch, const std::string& word) {
  return std::to_string(launch.rank) + " " + std::to_string(launch.ranks) + " " + word + " " + fattn_version();
}
std::optional<Hello> hello_of(const std::string& text) {
  std::istringstream in(text);
  Hello hello;
  std::string rest;
  if (!(in >> hello.rank >> hello.ranks >> hello.word >> hello.version) || in >> rest) return std::nullopt;
  return hello;
}

// Where rank 0 listens if a file says so to the others.
std::string own_host(const Launch& launch) {
  if (!launch.host.empty()) return launch.host;
  if (launch.local_ranks == launch.ranks) return "127.0.0.1";
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

// None: there is no such file yet.
std::optional<Place> read_place(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) return std::nullopt;
  std::string text;
  try {
    text = files::read_whole(path, kMostFile);
  } catch (const files::FileError&) {
    if (access(path.c_str(), F_OK) != 0) return std::nullopt;  // just removed
    throw;
  }
  std::istringstream in(text);
  std::string name;
  Place place;
  int version = 0;
  if (!(in >> name >> version >> place.host >> place.port >> place.word) || name != "fattn-rendezvous" || version != 1 || place.port < 1 ||
      place.port > 65535)
    throw Error("'" + printable(path, 200) + "' is no file of a rendezvous; give --rendezvous the name of one that does not exist yet");
  return place;
}

// Removes the file of a rendezvous when everybody is there, or nobody is waited for any more.
class PlaceFile {
 public:
  PlaceFile(const std::string& path, const Place& place) : path_(path) {
    if (path.empty()) return;
    read_place(path);  // throws where the file is none of ours; one that an earlier run has left is replaced
    const std::string text = "fattn-rendezvous 1\n" + place.host + "\n" + std::to_string(place.port) + "\n" + place.word + "\n";
    files::WholeFile file(path);
    file.write(text.data(), text.size());
    file.publish();
  }
  ~PlaceFile() {
    if (!path_.empty()) unlink(path_.c_str());
  }
  PlaceFile(const PlaceFile&) = delete;
  PlaceFile& operator=(const PlaceFile&) = delete;

 private:
  const std::string path_;
};

std::string drawn_word() {
  std::random_device draw;
  char text[40];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", draw(), draw(), draw(), draw());
  return text;
}

[[noreturn]] void refuse(std::vector<Connection>& all, const std::string& why) {
  for (Connection& connection : all) {
    connection.send(MessageKind::kFailed, why);
    connection.work();
  }
  throw Error(why);
}

std::string missing(const std::vector<bool>& there) {
  std::string text;
  int count = 0;
  for (size_t i = 1; i < there.size(); ++i)
    if (!there[i] && ++count <= 8) text += (text.empty() ? "" : ", ") + std::to_string(i);
  return (count == 1 ? "rank " : "ranks ") + text + (count > 8 ? ", ..." : "") + (count == 1 ? " has" : " have");
}

std::vector<Connection> receive(const Launch& launch, double seconds) {
  Place place{launch.file.empty() ? launch.host : own_host(launch), launch.port};
  const Socket listener = listen_at(place.host, launch.file.empty() ? launch.port : 0);
  if (!launch.file.empty()) {
    place.port = port_of(listener);
    place.word = drawn_word();
  }
  const PlaceFile file(launch.file, place);
  struct Guest {
    Connection connection;
    Clock::time_point since;
  };
  std::vector<Guest> guests;
  std::vector<Connection> ranks;  // in the order of ranks in the end
  std::vector<int> numbers;
  std::vector<bool> there(static_cast<size_t>(launch.ranks), false);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (static_cast<int>(ranks.size()) + 1 < launch.ranks) {
    if (Clock::now() > end) refuse(ranks, missing(there) + " not come within " + seconds_text(seconds) + " to rank 0 at " + place_text(place));
    std::vector<pollfd> waiting = {{listener.get(), POLLIN, 0}};
    for (const Guest& guest : guests) waiting.push_back({guest.connection.descriptor(), POLLIN, 0});
    poll(waiting.data(), waiting.size(), 50);
    for (Socket socket = accept_from(listener); socket; socket = accept_from(listener))
      guests.push_back({Connection(std::move(socket)), Clock::now()});
    for (Guest& guest : guests) {
      const bool open = guest.connection.work();
      std::optional<Hello> hello;
      try {
        const std::optional<Message> message = guest.connection.next();
        if (message && message->kind == MessageKind::kHello) hello = hello_of(message->text);
        if (message && !hello) guest.connection.close();
      } catch (const Error&) {
        guest.connection.close();  // somebody else's program
      }
      if (hello && hello->word == place.word) {
        guest.connection.trust();
        ranks.push_back(std::move(guest.connection));
        numbers.push_back(hello->rank);
        const std::string who = "rank " + std::to_string(hello->rank);
        if (hello->version != fattn_version())
          refuse(ranks, who + " is fattn " + printable(hello->version, 40) + ", rank 0 is " + fattn_version() + "; all must be the same");
        if (hello->ranks != launch.ranks || hello->rank < 1 || hello->rank >= launch.ranks)
          refuse(ranks,
                 who + " was started as one of " + std::to_string(hello->ranks) + " processes, rank 0 as one of " + std::to_string(launch.ranks));
        if (there[static_cast<size_t>(hello->rank)]) refuse(ranks, "two processes say that they are " + who);
        there[static_cast<size_t>(hello->rank)] = true;
      } else if (hello || !open || Clock::now() - guest.since > kHello) {
        guest.connection.close();
      }
    }
    guests.erase(std::remove_if(guests.begin(), guests.end(), [](const Guest& guest) { return guest.connection.closed(); }), guests.end());
  }
  std::vector<Connection> ordered;
  for (int rank = 1; rank < launch.ranks; ++rank) {
    const auto at = std::find(numbers.begin(), numbers.end(), rank) - numbers.begin();
    ordered.push_back(std::move(ranks[static_cast<size_t>(at)]));
    ordered.back().send(MessageKind::kWelcome, "");
    ordered.back().work();
  }
  return ordered;
}

// Waits for rank 0's answer. None: whoever listens there has closed, or there is another place now.
std::optional<Message> answer_of(Connection& connection, Clock::time_point end, const std::function<bool()>& replaced) {
  while (Clock::now() < end) {
    const bool open = connection.work();
    if (auto message = connection.next()) return message;
    if (!open || replaced()) return std::nullopt;
    pollfd waiting{connection.descriptor(), POLLIN, 0};
    poll(&waiting, 1, 50);
  }
  throw Error("rank 0 has not welcomed this process in time: others are missing");
}

std::vector<Connection> come(const Launch& launch, double seconds) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::string reason = "there is no file '" + printable(launch.file, 200) + "'";
  for (; Clock::now() < end; std::this_thread::sleep_for(kRetry)) {
    std::optional<Place> place = Place{launch.host, launch.port};
    if (!launch.file.empty()) place = read_place(launch.file);
    if (!place) continue;
    std::string why;
    Socket socket = connect_to(place->host, place->port, why);
    if (!socket) {
      reason = place_text(*place) + ": " + why;
      continue;
    }
    Connection connection(std::move(socket));
    connection.send(MessageKind::kHello, text_of(launch, place->word));
    const auto replaced = [&] {  // by rank 0 of this run: what was there before was another's
      if (launch.file.empty()) return false;
      const std::optional<Place> now = read_place(launch.file);
      return now && now->word != place->word;
    };
    std::optional<Message> answer;
    try {
      answer = answer_of(connection, end + kHello, replaced);
    } catch (const Error& other) {  // of a file: whatever has the port of a run that has ended
      if (launch.file.empty()) throw;
      reason = place_text(*place) + ": " + other.what();
      continue;
    }
    if (answer && answer->kind == MessageKind::kFailed) throw Error(printable(answer->text));
    if (answer && answer->kind == MessageKind::kWelcome) {
      connection.trust();
      std::vector<Connection> one;
      one.push_back(std::move(connection));
      return one;
    }
    reason = place_text(*place) + ": whoever listens there has closed the connection";
    if (launch.file.empty()) throw Error("rank 0 has ended before all were there, or is none of fattn (" + reason + ")");
  }
  throw Error("rank 0 has not come within " + seconds_text(seconds) + " (" + reason +
              "); are all processes started, and with the same meeting place?");
}

}  // namespace

std::vector<Connection> meet(const Launch& launch, double seconds) { return launch.rank == 0 ? receive(launch, seconds) : come(launch, seconds); }

}  // namespace fattn::gpt2
